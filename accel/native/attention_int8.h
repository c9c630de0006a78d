// Queries, scores and weights of attention over int8 KV, in integers: keys and values go into the products as they are stored.
//
// Queries and weights are numbers of 16 bits with a scale of their own, cut into two bytes, upper and lower. Sums of
// 256 * upper + lower are exact, so that they are the same whatever other queries there are, with AMX and without. 8 bits
// would do for the bytes of KV, but not for weights: a softmax over many tokens consists of small ones.
#pragma once
#include "attention_avx512.h"

namespace sage::attention_detail {

class Int8Softmax : protected TileSoftmax {
 protected:
  using TileSoftmax::TileSoftmax;

  // Where the weights of some queries go: bytes of (query, token), and what 1 stands for in each query's.
  struct Weights {
    unsigned char *upper, *lower;
    float* units;
  };

  // A sum of upper and of lower bytes' products.
  static __m512i joined(__m512i upper, __m512i lower) { return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower); }

  // Units in one, and scores' units, of a query.
  float per_unit_of(const float* query, float& unit) const {
    const float highest = largest_magnitude(query);
    unit = highest / kLargestQuery * scoring_.scale;
    return highest > kSmallest ? kLargestQuery / highest : 0.0f;
  }

  // Up to 64 dimensions of a query become upper and lower bytes, with zeros behind. Returns what they add up to, in parts.
  static __m512i cut_query(const float* x, int64_t count, Vec per_unit, unsigned char* upper, unsigned char* lower) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < 64; d += 16) {
      const __m512i units = d < count ? _mm512_cvtps_epi32(mul(load(x + d), per_unit)) : _mm512_setzero_si512();
      const __m512i rounded = _mm512_srai_epi32(_mm512_add_epi32(units, _mm512_set1_epi32(128)), 8);
      _mm_store_si128(reinterpret_cast<__m128i*>(upper + d), _mm512_cvtepi32_epi8(rounded));
      _mm_store_si128(reinterpret_cast<__m128i*>(lower + d), _mm512_cvtepi32_epi8(units));
      sum = _mm512_add_epi32(sum, units);
    }
    return sum;
  }

  // The products of up to four queries of a tile become weights of 16 bits, times the scales of the values; each query's
  // have a unit of their own. `n`: the first query's number in its head, `q`: in all.
  void weigh(const Queries& queries, int64_t n, int64_t q, int64_t count, const KVTile& tile, const int32_t* dots,
             const Weights& to) const {
    switch (count) {
      case 1: return weigh<1>(queries, n, q, tile, dots, to);
      case 2: return weigh<2>(queries, n, q, tile, dots, to);
      case 3: return weigh<3>(queries, n, q, tile, dots, to);
      default: return weigh<4>(queries, n, q, tile, dots, to);
    }
  }

  template <int64_t count>
  void weigh(const Queries& queries, int64_t n, int64_t q, const KVTile& tile, const int32_t* dots, const Weights& to) const {
    alignas(64) float scores[4 * kTileTokens];
    __mmask16 seen[4][4];
    Vec top[4] = {all(kNone), all(kNone), all(kNone), all(kNone)}, total[4] = {zero(), zero(), zero(), zero()};
    Vec most[4] = {zero(), zero(), zero(), zero()};
    SAGE_UNROLL for (int64_t k = 0; k < count; ++k) {
      set_seen(queries.low[n + k], queries.high[n + k], tile, seen[k]);
      top[k] = score(query_units_[q + k], tile, dots + k * kTileTokens, seen[k], scores + k * kTileTokens);
    }
    raise_maxima(queries.softmax, q, count, maxima<false>(top));
    SAGE_UNROLL for (int64_t k = 0; k < count; ++k) {
      float* row = scores + k * kTileTokens;
      SAGE_UNROLL for (int64_t u = 0; u < 4; ++u) {
        const Vec p = _mm512_maskz_mov_ps(seen[k][u], weight_of(sub(load(row + u * 16), all(queries.softmax.m[q + k]))));
        total[k] = add(total[k], p);
        const Vec weight = _mm512_maskz_mul_ps(seen[k][u], p, load(tile.value_scale + u * 16));
        most[k] = larger<true>(most[k], weight);
        store(row + u * 16, weight);
      }
    }
    // The arrays have room for all 16 queries of a tile.
    float* l = queries.softmax.l + q;
    _mm_storeu_ps(l, _mm_add_ps(_mm_loadu_ps(l), sums(total[0], total[1], total[2], total[3])));
    const __m128 largest = maxima<true>(most);
    _mm_store_ps(to.units, _mm_div_ps(largest, _mm_set1_ps(kLargestWeight)));
    const __mmask8 is_any = _mm_cmp_ps_mask(largest, _mm_set1_ps(kSmallest), _CMP_GT_OQ);
    alignas(16) float per_unit[4];
    _mm_store_ps(per_unit, _mm_maskz_div_ps(is_any, _mm_set1_ps(kLargestWeight), largest));
    SAGE_UNROLL for (int64_t k = 0; k < count; ++k) store_weights(scores + k * kTileTokens, all(per_unit[k]), to.upper + k * kTileTokens, to.lower + k * kTileTokens);
  }

  float* query_units_ = nullptr;  // of kMaxQueries

 private:
  static constexpr float kLargestQuery = 127 * 256 + 127;  // both parts have a sign
  static constexpr float kLargestWeight = 255 * 256 + 255;
  static constexpr float kSmallest = 1e-33f;  // what has a smaller maximum counts as 0: its inverse could be infinite
  float largest_magnitude(const float* x) const {
    Vec most[4] = {zero(), zero(), zero(), zero()};
    for (int64_t d = 0; d < head_dim_; d += 16) most[0] = larger<true>(most[0], magnitude(load(x + d)));
    return _mm_cvtss_f32(maxima<true>(most));
  }

  // Products become scores; returns the largest of each 16th token.
  Vec score(float unit, const KVTile& tile, const int32_t* dots, const __mmask16 (&seen)[4], float* scores) const {
    Vec top = all(kNone);
    SAGE_UNROLL for (int64_t u = 0; u < 4; ++u) {
      Vec x = mul(mul(_mm512_cvtepi32_ps(_mm512_load_si512(dots + u * 16)), load(tile.key_scale + u * 16)), all(unit));
      if (scoring_.soft_cap != 0.0f) x = mul(all(scoring_.soft_cap), tanh(x));
      top = _mm512_mask_max_ps(top, seen[u], top, x);
      store(scores + u * 16, x);
    }
    return top;
  }

  // Cuts weights into bytes. Fours of tokens come out transposed: token 16 u + 4 k + i at 16 k + 4 u + i.
  static void store_weights(const float* x, Vec per_unit, unsigned char* upper, unsigned char* lower) {
    __m512i w[4];
    SAGE_UNROLL for (int64_t u = 0; u < 4; ++u) w[u] = _mm512_cvtps_epi32(mul(load(x + u * 16), per_unit));
    const __m512i a = _mm512_packus_epi32(w[0], w[1]), b = _mm512_packus_epi32(w[2], w[3]), byte = _mm512_set1_epi16(255);
    _mm512_store_si512(upper, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
    _mm512_store_si512(lower, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
  }
};

}  // namespace sage::attention_detail
