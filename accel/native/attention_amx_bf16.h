// Attention by AMX tiles, in bf16 with float32 sums, over bf16 KV.
//
// The queries of a KV head lie in tiles of 16. Products come out transposed, token by query, so that the softmax of 16
// queries is done lane by lane; weights then turn into rows of queries for the product with the values.
#pragma once
#include <utility>

#include "attention_amx_tile.h"
#include "attention_bf16.h"

namespace sage::attention_detail {

class AmxBf16Kernel {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    const int64_t padded = round_up(head_dim, 32);
    return kMaxQueries * padded * 2 + kTileTokens * padded * 2 + kTileTokens * head_dim * 2 + 2 * kProductBytes + kWeightBytes;
  }

  AmxBf16Kernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : kv_(kv), scoring_(scoring), head_dim_(head_dim), padded_(round_up(head_dim, 32)),
        reads_keys_in_place_(kv.block_size % 16 == 0 && head_dim % 32 == 0) {
    const auto take = [&scratch](int64_t bytes) { return std::exchange(scratch, scratch + bytes); };
    queries_ = reinterpret_cast<uint32_t*>(take(kMaxQueries * padded_ * 2));
    keys_ = take(kTileTokens * padded_ * 2);
    values_ = reinterpret_cast<uint32_t*>(take(kTileTokens * head_dim * 2));
    for (float*& products : products_) products = reinterpret_cast<float*>(take(kProductBytes));
    weights_ = reinterpret_cast<uint32_t*>(take(kWeightBytes));
  }

  ~AmxBf16Kernel() { _tile_release(); }
  AmxBf16Kernel(const AmxBf16Kernel&) = delete;
  AmxBf16Kernel& operator=(const AmxBf16Kernel&) = delete;

  // Packs the queries of each tile as (pair of dimensions, query, 2).
  void set_queries(const Queries& queries) {
    is_narrow_ = queries.stride == 16;  // decodes: all fit one tile
    config_.load(is_narrow_ ? queries.count : 16);
    for (int64_t h = 0; h < queries.num_heads; ++h) {
      for (int64_t at = 0; at < queries.stride; at += 16) {
        const int64_t q = h * queries.stride + at;
        pack_queries(queries.query + q, std::min<int64_t>(16, queries.count - at), queries_ + q * padded_ / 2);
      }
    }
  }

  void add_tile(const Queries& queries, int64_t head, const KVTile& tile, Prefetch& ahead) {
    ahead_ = &ahead;
    first_ = tile.begin / 16;
    last_ = (tile.end + 15) / 16;
    find_keys(tile);
    pack_values(tile);
    const int64_t num_tiles = queries.stride / 16;
    int64_t at = next_seen(queries, tile, 0, num_tiles);
    if (is_narrow_) {
      if (at == num_tiles) return;
      multiply_keys_narrow(head, products_[0]);
      return add_products(queries, head, at, tile, products_[0]);
    }
    if (at < num_tiles) multiply_keys(head * num_tiles + at, products_[0]);
    for (int64_t turn = 0; at < num_tiles; turn ^= 1) {
      // The next products run while this softmax does.
      const int64_t next = next_seen(queries, tile, at + 1, num_tiles);
      if (next < num_tiles) multiply_keys(head * num_tiles + next, products_[turn ^ 1]);
      add_products(queries, head, at, tile, products_[turn]);
      at = next;
    }
  }

 private:
  static constexpr int64_t kProductBytes = kTileTokens * 16 * 4, kWeightBytes = 16 * kTileTokens * 2;
  // A maximum that grows by less than this is left as it is: weights are then at most 2^8, and the accumulator need not
  // be brought to the new one.
  static constexpr float kSlack = 8.0f;

  void pack_queries(const float* const* query, int64_t count, uint32_t* to) const {
    for (int64_t d = 0; d < padded_; d += 32) {
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const Vec first = i < count ? load(query[i] + d) : zero();
        const Vec second = i < count && d + 32 <= head_dim_ ? load(query[i] + d + 16) : zero();
        pairs[i] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      }
      transpose(pairs);
      for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + d * 8 + i * 16, pairs[i]);
    }
  }

  // Where each 16 tokens' keys are. Those that are not the sequence's may be anything: their products are not used.
  void find_keys(const KVTile& tile) {
    key_step_ = reads_keys_in_place_ ? kv_.token : padded_ * 2;
    for (int64_t u = first_; u < last_; ++u) {
      const int64_t known = std::max(tile.begin, u * 16);
      if (reads_keys_in_place_) {
        key_[u] = tile.key[known] - (known - u * 16) * kv_.token;
        continue;
      }
      key_[u] = keys_ + u * 16 * key_step_;
      for (int64_t t = known; t < std::min(tile.end, u * 16 + 16); ++t) copy_key(tile.key[t], keys_ + t * key_step_);
    }
  }

  // Copies a key, with zeros behind.
  void copy_key(const unsigned char* key, unsigned char* to) const {
    for (int64_t d = 0; d < padded_; d += 32) {
      const bool whole = d + 32 <= head_dim_;
      _mm512_storeu_si512(to + d * 2, _mm512_maskz_loadu_epi16(whole ? 0xffffffff : 0xffff, key + d * 2));
    }
  }

  // Packs values as (pair of tokens, dimension, 2).
  void pack_values(const KVTile& tile) {
    for (int64_t pair = first_ * 8; pair < round_up(last_, 2) * 8; ++pair) {
      ahead_->rows(is_narrow_ ? 1 : 4);
      pack_pair(tile.value[pair * 2], tile.value[pair * 2 + 1], head_dim_, values_ + pair * head_dim_);
    }
    if (first_ % 2 != 0) std::memset(values_ + (first_ - 1) * 8 * head_dim_, 0, static_cast<size_t>(8 * head_dim_ * 4));
  }

  // products (token, query) = keys . queries of one tile.
  void multiply_keys(int64_t query_tile, float* products) const {
    finish_writes();
    const uint32_t* query = queries_ + query_tile * 16 * padded_ / 2;
    const int64_t steps = padded_ / 32;
    if (first_ == 0 && last_ == 4) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < steps; ++k) {
        _tile_loadd(4, query + k * 256, 64);
        _tile_loadd(5, key_[0] + k * 64, key_step_);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, key_[1] + k * 64, key_step_);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(7, key_[2] + k * 64, key_step_);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, key_[3] + k * 64, key_step_);
        _tile_dpbf16ps(3, 5, 4);
      }
      _tile_stored(0, products, 64);
      _tile_stored(1, products + 256, 64);
      _tile_stored(2, products + 512, 64);
      _tile_stored(3, products + 768, 64);
      return;
    }
    for (int64_t u = first_; u < last_; ++u) {
      _tile_zero(0);
      for (int64_t k = 0; k < steps; ++k) {
        _tile_loadd(4, query + k * 256, 64);
        _tile_loadd(5, key_[u] + k * 64, key_step_);
        _tile_dpbf16ps(0, 5, 4);
      }
      _tile_stored(0, products + u * 256, 64);
    }
  }

  // The same where tiles 5 to 7 are narrow.
  void multiply_keys_narrow(int64_t query_tile, float* products) const {
    finish_writes();
    const uint32_t* query = queries_ + query_tile * 16 * padded_ / 2;
    for (int64_t u = first_; u < last_; u += 2) {
      const int64_t v = std::min(u + 1, last_ - 1);
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t k = 0; k < padded_ / 32; ++k) {
        _tile_loadd(4, query + k * 256, 64);
        _tile_loadd(2, key_[u] + k * 64, key_step_);
        _tile_dpbf16ps(0, 2, 4);
        _tile_loadd(3, key_[v] + k * 64, key_step_);
        _tile_dpbf16ps(1, 3, 4);
        ahead_->rows(4);
      }
      _tile_stored(0, products + u * 256, 64);
      _tile_stored(1, products + v * 256, 64);
    }
  }

  // Brings a tile's products into the softmax of one tile of queries.
  void add_products(const Queries& queries, int64_t head, int64_t at, const KVTile& tile, float* products) {
    const __m512i low = _mm512_sub_epi32(_mm512_load_si512(queries.low + at * 16), _mm512_set1_epi32(tile.first));
    const __m512i high = _mm512_sub_epi32(_mm512_load_si512(queries.high + at * 16), _mm512_set1_epi32(tile.first));
    const auto real = static_cast<__mmask16>((1u << std::min<int64_t>(16, queries.count - at * 16)) - 1);
    const bool all_seen = (_mm512_mask_cmpgt_epi32_mask(real, low, _mm512_set1_epi32(first_ * 16)) |
                           _mm512_mask_cmplt_epi32_mask(real, high, _mm512_set1_epi32(last_ * 16))) == 0;
    const int64_t q = head * queries.stride + at * 16;
    float *m = queries.softmax.m + q, *acc = queries.softmax.acc + q * head_dim_;
    const Vec old_m = load(m);
    const Vec top = all_seen ? score<true>(low, high, products) : score<false>(low, high, products);
    const Vec new_m = pick(less(add(old_m, all(kSlack)), top), top, old_m);
    const __mmask16 grown = _mm512_cmp_ps_mask(old_m, new_m, _CMP_NEQ_OQ) & real;
    if (grown != 0) rescale(queries.softmax.l + q, acc, grown, sub(old_m, new_m));
    store(m, new_m);
    const Vec total = all_seen ? weigh<true>(low, high, new_m, products) : weigh<false>(low, high, new_m, products);
    store(queries.softmax.l + q, add(load(queries.softmax.l + q), total));
    multiply_values(acc);
  }

  static __mmask16 seen(int64_t t, __m512i low, __m512i high) {
    const __m512i token = _mm512_set1_epi32(static_cast<int32_t>(t));
    return _mm512_cmple_epi32_mask(low, token) & _mm512_cmplt_epi32_mask(token, high);
  }

  // Products become scores; returns the largest of each query.
  template <bool all_seen>
  Vec score(__m512i low, __m512i high, float* products) const {
    Vec top[2] = {all(kNone), all(kNone)};
    if (scoring_.soft_cap == 0.0f) return plain_top<all_seen>(low, high, products);
    for (int64_t t = first_ * 16; t < last_ * 16; ++t) {
      Vec x = scoring_(load(products + t * 16));
      if constexpr (!all_seen) x = pick(seen(t, low, high), x, all(kNone));
      store(products + t * 16, x);
      top[t % 2] = max(top[t % 2], x);
    }
    return max(top[0], top[1]);
  }

  // The same where a score is only a product times the scale, which `weigh` then does on its way.
  template <bool all_seen>
  Vec plain_top(__m512i low, __m512i high, const float* products) const {
    Vec top[2] = {all(kNone), all(kNone)};
    for (int64_t t = first_ * 16; t < last_ * 16; t += 2) {
      for (int64_t k = 0; k < 2; ++k) {
        const Vec x = load(products + (t + k) * 16);
        top[k] = all_seen ? max(top[k], x) : pick(seen(t + k, low, high), max(top[k], x), top[k]);
      }
    }
    return max(all(kNone), mul(all(scoring_.scale), max(top[0], top[1])));
  }

  // Scores become bf16 weights, (query, token); returns the sum of each query's.
  template <bool all_seen>
  Vec weigh(__m512i low, __m512i high, Vec m, const float* products) {
    const bool plain = scoring_.soft_cap == 0.0f;
    const Vec scale = all(plain ? scoring_.scale : 1.0f);
    Vec total[2] = {zero(), zero()};
    for (int64_t half = first_ / 2; half < (last_ + 1) / 2; ++half) {
      __m512i pairs[16];
      for (int64_t pair = 0; pair < 16; ++pair) {
        const int64_t t = half * 32 + pair * 2;
        if (is_narrow_) ahead_->rows(1);
        Vec p[2] = {zero(), zero()};
        if (t >= first_ * 16 && t < last_ * 16) {
          for (int64_t k = 0; k < 2; ++k) {
            p[k] = weight_of(_mm512_fmsub_ps(load(products + (t + k) * 16), scale, m));
            if constexpr (!all_seen) p[k] = pick(seen(t + k, low, high), p[k], zero());
            total[k] = add(total[k], p[k]);
          }
        }
        pairs[pair] = interleaved(p[0], p[1]);
      }
      transpose(pairs);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(weights_ + half * 256 + i * 16, pairs[i]);
    }
    return add(total[0], total[1]);
  }

  static __m512i interleaved(Vec even, Vec odd) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
  }

  void rescale(float* l, float* acc, __mmask16 grown, Vec change) const {
    alignas(64) float decay[16];
    const Vec by = exp2(change);
    store(decay, by);
    store(l, _mm512_mask_mul_ps(load(l), grown, load(l), by));
    for (unsigned rest = grown; rest != 0; rest &= rest - 1) {
      const int64_t i = __builtin_ctz(rest);
      for (int64_t d = 0; d < head_dim_; d += 16) {
        float* at = acc + i * head_dim_ + d;
        store(at, mul(load(at), all(decay[i])));
      }
    }
  }

  // acc (16 queries, head_dim) += weights . values
  void multiply_values(float* acc) const {
    int64_t d = 0;
    if (is_narrow_) {
      for (; d + 32 <= head_dim_; d += 32) multiply_values_narrow<2>(acc, d);
      if (d < head_dim_) multiply_values_narrow<1>(acc, d);
      return;
    }
    for (; d + 64 <= head_dim_; d += 64) multiply_values_at<4>(acc, d);
    if (head_dim_ - d == 48) multiply_values_at<3>(acc, d);
    if (head_dim_ - d == 32) multiply_values_at<2>(acc, d);
    if (head_dim_ - d == 16) multiply_values_at<1>(acc, d);
  }

  // 16 * columns dimensions from d on
  template <int columns>
  void multiply_values_at(float* acc, int64_t d) const {
    finish_writes();
    const int64_t step = head_dim_ * 4;
    float* at = acc + d;
    _tile_loadd(0, at, step);
    if constexpr (columns > 1) _tile_loadd(1, at + 16, step);
    if constexpr (columns > 2) _tile_loadd(2, at + 32, step);
    if constexpr (columns > 3) _tile_loadd(3, at + 48, step);
    for (int64_t half = first_ / 2; half < (last_ + 1) / 2; ++half) {
      const uint32_t* value = values_ + half * 16 * head_dim_ + d;
      _tile_loadd(4, weights_ + half * 256, 64);
      _tile_loadd(5, value, step);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (columns > 1) {
        _tile_loadd(6, value + 16, step);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (columns > 2) {
        _tile_loadd(7, value + 32, step);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (columns > 3) {
        _tile_loadd(5, value + 48, step);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, at, step);
    if constexpr (columns > 1) _tile_stored(1, at + 16, step);
    if constexpr (columns > 2) _tile_stored(2, at + 32, step);
    if constexpr (columns > 3) _tile_stored(3, at + 48, step);
  }

  template <int columns>
  void multiply_values_narrow(float* acc, int64_t d) const {
    finish_writes();
    const int64_t step = head_dim_ * 4;
    _tile_loadd(6, acc + d, step);
    if constexpr (columns > 1) _tile_loadd(7, acc + d + 16, step);
    for (int64_t half = first_ / 2; half < (last_ + 1) / 2; ++half) {
      ahead_->rows(4);
      const uint32_t* value = values_ + half * 16 * head_dim_ + d;
      _tile_loadd(5, weights_ + half * 256, 64);
      _tile_loadd(3, value, step);
      _tile_dpbf16ps(6, 5, 3);
      if constexpr (columns > 1) {
        _tile_loadd(4, value + 16, step);
        _tile_dpbf16ps(7, 5, 4);
      }
    }
    _tile_stored(6, acc + d, step);
    if constexpr (columns > 1) _tile_stored(7, acc + d + 16, step);
  }

  const KV& kv_;
  Scoring scoring_;
  int64_t head_dim_, padded_;
  TileConfig config_;
  Prefetch* ahead_ = nullptr;
  bool is_narrow_ = false;
  bool reads_keys_in_place_;
  int64_t first_ = 0, last_ = 0, key_step_ = 0;  // the tile's groups of 16 tokens that have any
  uint32_t* queries_;
  unsigned char* keys_;
  uint32_t* values_;
  float* products_[2];
  uint32_t* weights_;
  const unsigned char* key_[4];
};

}  // namespace sage::attention_detail
