// What the attention kernels for AVX-512 share, those on AMX tiles too.
#pragma once
#include "attention_tile.h"

namespace sage::attention_detail {

// 2^x without the clamp of exp2 and within 3e-6: weights are rounded anyway.
inline Vec weight_of(Vec x) {
  const Vec n = round(x), f = sub(x, n);
  Vec p = all(9.582851e-3f);
  p = fma(p, f, all(5.590643e-2f));
  p = fma(p, f, all(0.24024099f));
  p = fma(p, f, all(0.6931242f));
  return times_power_of_two(fma(p, f, all(1.0f)), n);
}

// What the softmax of up to four queries of a tile is made of.
class TileSoftmax {
 protected:
  TileSoftmax(const Scoring& scoring, int64_t head_dim) : scoring_(scoring), head_dim_(head_dim) {}

  // Which of a tile's tokens [low, high) in the sequence are.
  static void set_seen(int64_t low, int64_t high, const KVTile& tile, __mmask16 (&seen)[4]) {
    const auto below = [&tile](int64_t position) {
      const int64_t token = std::clamp(position - tile.first, tile.begin, tile.end);
      return token >= 64 ? ~uint64_t{0} : (uint64_t{1} << token) - 1;
    };
    const uint64_t bits = below(high) & ~below(low);
    for (int64_t u = 0; u < 4; ++u) seen[u] = static_cast<__mmask16>(bits >> (u * 16));
  }

  // Positive floats sort as integers do, and NaN, which must not get lost, comes last.
  template <bool is_positive>
  static Vec larger(Vec a, Vec b) {
    if constexpr (!is_positive) return max(a, b);
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }

  // The largest of each of four vectors
  template <bool is_positive>
  static __m128 maxima(const Vec (&x)[4]) {
    const auto halves = [](Vec a, Vec b) { return larger<is_positive>(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
    const __m512d ab = _mm512_castps_pd(halves(x[0], x[1])), cd = _mm512_castps_pd(halves(x[2], x[3]));
    Vec most = larger<is_positive>(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    most = larger<is_positive>(most, _mm512_shuffle_f32x4(most, most, 0x4e));
    return _mm512_castps512_ps128(larger<is_positive>(most, _mm512_shuffle_f32x4(most, most, 0xb1)));
  }

  void raise_maxima(const Softmax& softmax, int64_t q, int64_t count, __m128 highest) const {
    const __m128 m = _mm_loadu_ps(softmax.m + q);
    const __mmask8 grown = _mm_cmp_ps_mask(highest, _mm_add_ps(m, _mm_set1_ps(kSlack)), _CMP_GT_OQ);
    for (unsigned rest = grown & ((1u << count) - 1); rest != 0; rest &= rest - 1) {
      const int64_t k = __builtin_ctz(rest);
      alignas(16) float top[4];
      _mm_store_ps(top, highest);
      const float decay = exp2(softmax.m[q + k] - top[k]);
      float* acc = softmax.acc + (q + k) * head_dim_;
      softmax.l[q + k] *= decay;
      softmax.m[q + k] = top[k];
      for (int64_t d = 0; d < head_dim_; d += 16) store(acc + d, mul(load(acc + d), all(decay)));
    }
  }

  Scoring scoring_;
  int64_t head_dim_;

 private:
  // A maximum that grows by less than this is left as it is: weights are then at most 2^8, and the accumulator need not
  // be brought to the new one.
  static constexpr float kSlack = 8.0f;
};

// 32 values of E4M3 times a power of two, in bf16: exact. Denormals become 0.
class Widening {
 public:
  // With a NaN scale, E4M3's NaN stays NaN; with any other it reads as 480 times the scale.
  explicit Widening(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    exponent_ = _mm512_set1_epi16(static_cast<int16_t>(std::min(bits >> 16 & 0x7f80u, 247u << 7) - (7u << 7)));
  }

  __m512i operator()(__m256i x) const {
    const __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(x), 4);
    const __mmask32 is_normal = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x0780));
    return _mm512_maskz_add_epi16(is_normal, _mm512_and_si512(bits, _mm512_set1_epi16(static_cast<int16_t>(0x87f0))), exponent_);
  }

 private:
  __m512i exponent_;  // where bf16 has it
};

// Transposes 16 by 16 integers.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int64_t i = 0; i < 8; ++i) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
  for (int64_t i = 0; i < 4; ++i) {
    x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
  }
  for (int64_t i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
  for (int64_t i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

}  // namespace sage::attention_detail
