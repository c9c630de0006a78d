// Attention by AMX tiles, in bf16 with float32 sums, over KV in bf16, or in fp8 that is widened to it.
//
// The queries of a KV head lie in tiles of 16. Products come out transposed, token by query, so that the softmax of 16
// queries is done lane by lane; weights then turn into rows of queries for the product with the values. The few queries of
// a decode lie in a tile of 2, 4 or 8 columns, whose products fill vectors with several tokens each.
#pragma once
#include <utility>

#include "attention_amx_tile.h"
#include "attention_bf16.h"

namespace sage::attention_detail {

template <KVKind kind>
class AmxBf16Kernel {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    const int64_t padded = round_up(head_dim, 32);
    return kMaxQueries * padded * 2 + kTileTokens * padded * 2 + kTileTokens * head_dim * 2 + 2 * kProductBytes + kMaxQueries / 16 * kWeightBytes;
  }

  AmxBf16Kernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : kv_(kv), scoring_(scoring), head_dim_(head_dim), padded_(round_up(head_dim, 32)),
        reads_keys_in_place_(!is_scaled(kind) && kv.block_size % 16 == 0 && head_dim % 32 == 0) {
    const auto take = [&scratch](int64_t bytes) { return std::exchange(scratch, scratch + bytes); };
    queries_ = reinterpret_cast<uint32_t*>(take(kMaxQueries * padded_ * 2));
    keys_ = take(kTileTokens * padded_ * 2);
    for (float*& products : products_) products = reinterpret_cast<float*>(take(kProductBytes));
    weights_ = reinterpret_cast<uint32_t*>(take(kMaxQueries / 16 * kWeightBytes));
    values_ = reinterpret_cast<uint32_t*>(take(kTileTokens * head_dim * 2));
  }

  ~AmxBf16Kernel() { _tile_release(); }
  AmxBf16Kernel(const AmxBf16Kernel&) = delete;
  AmxBf16Kernel& operator=(const AmxBf16Kernel&) = delete;

  // Packs the queries of each tile as (pair of dimensions, column, 2).
  void set_queries(const Queries& queries) {
    is_narrow_ = queries.count <= 8;
    columns_ = queries.count <= 2 ? 2 : queries.count <= 4 ? 4 : is_narrow_ ? 8 : 16;
    // Few queries then cost less: 0 to 2 for products with keys, 5 to 7 for those with values.
    config_.set(0, 2, 16, is_narrow_ ? columns_ * 4 : 64);
    config_.set(5, 7, is_narrow_ ? queries.count : 16, 64);
    config_.load();
    for (int64_t h = 0; h < queries.num_heads; ++h) {
      for (int64_t at = 0; at < queries.stride; at += 16) {
        const int64_t q = h * queries.stride + at;
        pack_queries(queries.query + q, std::min<int64_t>(16, queries.count - at), queries_ + q * padded_ / 2);
      }
    }
  }

  // Puts the sums of a query, which lie as `pack_values` leaves the dimensions of values, in order.
  void sort_dimensions(float* acc) const {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    int64_t d = 0;
    for (; d + 32 <= head_dim_; d += 32) {
      const __m512d a = _mm512_castps_pd(load(acc + d)), b = _mm512_castps_pd(load(acc + d + 16));
      store(acc + d, _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b)));
      store(acc + d + 16, _mm512_castpd_ps(_mm512_permutex2var_pd(a, second, b)));
    }
    if (d < head_dim_) store(acc + d, _mm512_shuffle_f32x4(load(acc + d), load(acc + d), 0xd8));
  }

  // Brings a tile into the softmax of all heads' queries.
  void add_tile(const Queries& queries, KVTile& tile, const KVTile* following) {
    for_heads(kv_, head_dim_, queries, tile, following, [&](int64_t head, Prefetch& ahead) { add_head(queries, head, tile, ahead); });
  }

 private:
  void add_head(const Queries& queries, int64_t head, const KVTile& tile, Prefetch& ahead) {
    ahead_ = &ahead;
    first_ = tile.begin / 16;
    last_ = (tile.end + 15) / 16;
    const int64_t num_tiles = queries.stride / 16;
    int64_t at = next_seen(queries, tile, 0, num_tiles);
    if (at == num_tiles) return;
    find_keys(tile);
    if (is_narrow_) return add_few(queries, {head, tile.first, first_, last_}, tile);
    const int64_t first_at = at;
    multiply_keys(head * num_tiles + at, products_[0]);
    for (int64_t turn = 0; at < num_tiles; turn ^= 1) {
      // The next products run while this softmax does.
      const int64_t next = next_seen(queries, tile, at + 1, num_tiles);
      if (next < num_tiles) multiply_keys(head * num_tiles + next, products_[turn ^ 1]);
      add_products(queries, head, at, tile, products_[turn]);
      at = next;
    }
    // Only then the values: the L1 cache has no room for both.
    pack_values(tile);
    for (at = first_at; at < num_tiles; at = next_seen(queries, tile, at + 1, num_tiles)) {
      multiply_values(weights_ + at * kWeightWords, queries.softmax.acc + (head * queries.stride + at * 16) * head_dim_);
    }
  }

  // A tile of one head, of which tokens [16 first, 16 last) are read for few queries.
  struct Turn {
    int64_t head, first_token, first, last;
  };

  void add_few(const Queries& queries, const Turn& turn, const KVTile& tile) {
    multiply_keys_narrow(turn.head, products_[0]);
    if (columns_ == 2) weigh_few<2>(queries, turn);
    if (columns_ == 4) weigh_few<4>(queries, turn);
    if (columns_ == 8) weigh_few<8>(queries, turn);
    // Packed values of 32 tokens at a time stay in the L1 cache.
    for (int64_t half = turn.first / 2; half < (turn.last + 1) / 2; ++half) {
      pack_half(tile, half, 1, values_);
      multiply_values_few(half, queries.softmax.acc + turn.head * queries.stride * head_dim_);
    }
  }

  static constexpr int64_t kProductBytes = kTileTokens * 16 * 4, kWeightBytes = 16 * kTileTokens * 2, kWeightWords = kWeightBytes / 4;
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
      const auto columns = static_cast<__mmask16>((1u << columns_) - 1);
      for (int64_t i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(to + (d / 2 + i) * columns_, columns, pairs[i]);
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
      for (int64_t t = known; t < std::min(tile.end, u * 16 + 16); ++t) copy_key(tile, t, keys_ + t * key_step_);
    }
  }

  // Copies a key in bf16, with zeros behind.
  void copy_key(const KVTile& tile, int64_t t, unsigned char* to) const {
    const Row key(tile.key[t], tile.key_scale[t]);
    int64_t d = 0;
    for (; d + 32 <= head_dim_; d += 32) _mm512_storeu_si512(to + d * 2, key.load(d));
    if (d < head_dim_) _mm512_storeu_si512(to + d * 2, key.load_half(d));
  }

  // A token's key or value, whose dimensions from d on come as bf16, 32 of them or 16 and zeros.
  class Row {
   public:
    Row(const unsigned char* values, float scale) : values_(values), widen_(scale) {}

    __m512i load(int64_t d) const {
      if constexpr (!is_scaled(kind)) return _mm512_loadu_si512(values_ + d * 2);
      return widen_(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values_ + d)));
    }

    __m512i load_half(int64_t d) const {
      if constexpr (!is_scaled(kind)) return _mm512_maskz_loadu_epi16(0xffff, values_ + d * 2);
      return widen_(_mm256_maskz_loadu_epi8(0xffff, values_ + d));
    }

   private:
    const unsigned char* values_;
    Widening widen_;
  };

  // Packs values as (pair of tokens, dimension, 2), dimensions in the order in which interleaving leaves them.
  void pack_values(const KVTile& tile) {
    for (int64_t half = first_ / 2; half < (last_ + 1) / 2; ++half) pack_half(tile, half, 4, values_ + half * 16 * head_dim_);
  }

  // Packs 32 tokens.
  void pack_half(const KVTile& tile, int64_t half, int64_t rows_ahead, uint32_t* to) {
    int64_t pair = 0;
    if (half * 2 < first_) {
      pair = 8;
      std::memset(to, 0, static_cast<size_t>(pair * head_dim_ * 4));
    }
    for (; pair < 16; ++pair) {
      ahead_->rows(rows_ahead);
      const int64_t t = half * 32 + pair * 2;
      const Row even(tile.value[t], tile.value_scale[t]), odd(tile.value[t + 1], tile.value_scale[t + 1]);
      interleave_pair(even, odd, to + pair * head_dim_);
    }
  }

  void interleave_pair(const Row& even, const Row& odd, uint32_t* to) const {
    int64_t d = 0;
    for (; d + 32 <= head_dim_; d += 32) {
      const __m512i a = even.load(d), b = odd.load(d);
      _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(to + d + 16, _mm512_unpackhi_epi16(a, b));
    }
    if (d == head_dim_) return;
    const __m256i a = _mm512_castsi512_si256(even.load_half(d)), b = _mm512_castsi512_si256(odd.load_half(d));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d), _mm256_unpacklo_epi16(a, b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d + 8), _mm256_unpackhi_epi16(a, b));
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

  // The same, (token, column), where columns are few.
  void multiply_keys_narrow(int64_t head, float* products) const {
    finish_writes();
    const uint32_t* query = queries_ + head * 16 * padded_ / 2;
    const int64_t step = columns_ * 4;
    for (int64_t u = first_; u < last_; u += 2) {
      const int64_t v = std::min(u + 1, last_ - 1);
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t k = 0; k < padded_ / 32; ++k) {
        _tile_loadd(2, query + k * 16 * columns_, step);
        ahead_->rows(1);
        _tile_loadd(3, key_[u] + k * 64, key_step_);
        ahead_->rows(1);
        _tile_dpbf16ps(0, 3, 2);
        ahead_->rows(1);
        _tile_loadd(4, key_[v] + k * 64, key_step_);
        ahead_->rows(1);
        _tile_dpbf16ps(1, 4, 2);
      }
      _tile_stored(0, products + u * 16 * columns_, step);
      _tile_stored(1, products + v * 16 * columns_, step);
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
    const __mmask16 grown = _mm512_cmp_ps_mask(old_m, new_m, _CMP_NEQ_OQ) & _mm512_cmp_ps_mask(old_m, all(kNone), _CMP_NEQ_OQ) & real;
    if (grown != 0) rescale(queries.softmax.l + q, acc, grown, sub(old_m, new_m));
    store(m, new_m);
    uint32_t* weights = weights_ + at * kWeightWords;
    const Vec total = all_seen ? weigh<true>(low, high, new_m, products, weights) : weigh<false>(low, high, new_m, products, weights);
    store(queries.softmax.l + q, add(load(queries.softmax.l + q), total));
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
  Vec weigh(__m512i low, __m512i high, Vec m, const float* products, uint32_t* weights) const {
    const bool plain = scoring_.soft_cap == 0.0f;
    const Vec scale = all(plain ? scoring_.scale : 1.0f);
    Vec total[4] = {zero(), zero(), zero(), zero()};  // of each fourth token: an order of additions that few queries can keep
    for (int64_t half = first_ / 2; half < (last_ + 1) / 2; ++half) {
      __m512i pairs[16];
      SAGE_UNROLL for (int64_t pair = 0; pair < 16; ++pair) {
        const int64_t t = half * 32 + pair * 2;
        Vec p[2] = {zero(), zero()};
        if (t >= first_ * 16 && t < last_ * 16) {
          for (int64_t k = 0; k < 2; ++k) {
            p[k] = weight_of(_mm512_fmsub_ps(load(products + (t + k) * 16), scale, m));
            if constexpr (!all_seen) p[k] = pick(seen(t + k, low, high), p[k], zero());
            total[pair % 2 * 2 + k] = add(total[pair % 2 * 2 + k], p[k]);
          }
        }
        pairs[pair] = interleaved(p[0], p[1]);
      }
      transpose(pairs);
      SAGE_UNROLL for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(weights + half * 256 + i * 16, pairs[i]);
    }
    return add(add(total[0], total[2]), add(total[1], total[3]));
  }

  static __m512i interleaved(Vec even, Vec odd) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
  }

  // The same of at most `columns` queries. A vector holds the products of 16 / columns tokens; lane by lane it repeats the
  // queries. Every bit is as `score` and `weigh` have it.
  template <int columns>
  void weigh_few(const Queries& queries, const Turn& turn) {
    float* products = products_[0];
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i column = _mm512_and_si512(lane, _mm512_set1_epi32(columns - 1));
    // Seen of vector i are the lanes with low <= i * 16 / columns < high.
    const __m512i token = _mm512_add_epi32(_mm512_srli_epi32(lane, log2_of(columns)), _mm512_set1_epi32(static_cast<int32_t>(turn.first_token)));
    const __m512i low = _mm512_sub_epi32(_mm512_permutexvar_epi32(column, _mm512_load_si512(queries.low)), token);
    const __m512i high = _mm512_sub_epi32(_mm512_permutexvar_epi32(column, _mm512_load_si512(queries.high)), token);
    const int64_t begin = turn.first * columns, end = turn.last * columns;
    const bool plain = scoring_.soft_cap == 0.0f;
    __mmask16 seen[4 * columns];
    Vec top[2] = {all(kNone), all(kNone)};
    for (int64_t i = begin; i < end; ++i) {
      const __m512i first_token = _mm512_set1_epi32(static_cast<int32_t>(i * 16 / columns));
      seen[i] = _mm512_cmple_epi32_mask(low, first_token) & _mm512_cmplt_epi32_mask(first_token, high);
      Vec x = load(products + i * 16);
      if (!plain) store(products + i * 16, x = scoring_(x));
      top[i % 2] = _mm512_mask_max_ps(top[i % 2], seen[i], top[i % 2], x);
    }
    Vec highest = over_tokens<columns>(max(top[0], top[1]), [](Vec a, Vec b) { return max(a, b); });
    if (plain) highest = max(all(kNone), mul(all(scoring_.scale), highest));

    const int64_t q = turn.head * queries.stride;
    float *m = queries.softmax.m + q, *l = queries.softmax.l + q, *acc = queries.softmax.acc + q * head_dim_;
    const Vec old_m = _mm512_permutexvar_ps(column, load(m)), new_m = pick(less(add(old_m, all(kSlack)), highest), highest, old_m);
    const __mmask16 grown = _mm512_cmp_ps_mask(old_m, new_m, _CMP_NEQ_OQ) & static_cast<__mmask16>((1u << queries.count) - 1);
    if (grown != 0) rescale(l, acc, grown, sub(old_m, new_m));
    store(m, new_m);
    store(l, add(load(l), weights_of_few<columns>(turn, seen, plain ? scoring_.scale : 1.0f, new_m)));
  }

  static constexpr int log2_of(int x) { return x == 1 ? 0 : 1 + log2_of(x / 2); }

  // Joins the lanes of each column, those farthest apart first.
  template <int columns, class Join>
  static Vec over_tokens(Vec x, const Join& join) {
    x = join(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    if constexpr (columns <= 4) x = join(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    if constexpr (columns <= 2) x = join(x, _mm512_permute_ps(x, 0x4e));
    return x;
  }

  template <int columns>
  Vec weights_of_few(const Turn& turn, const __mmask16* seen, float scale, Vec m) {
    const float* products = products_[0];
    Vec total[2] = {zero(), zero()};
    for (int64_t half = turn.first / 2; half < (turn.last + 1) / 2; ++half) {
      __m512i rows[columns];
      for (int64_t k = 0; k < columns; ++k) {
        ahead_->rows(16 / columns);
        Vec p[2] = {zero(), zero()};
        for (int64_t n = 0; n < 2; ++n) {
          const int64_t i = half * 2 * columns + 2 * k + n;
          if (i < turn.first * columns || i >= turn.last * columns) continue;
          p[n] = _mm512_maskz_mov_ps(seen[i], weight_of(_mm512_fmsub_ps(load(products + i * 16), all(scale), m)));
          if constexpr (columns == 2) {  // eight tokens, of which four are added at a time
            const __m256 later = _mm512_extractf32x8_ps(p[n], 1);
            const __m256 sum = _mm256_add_ps(_mm512_castps512_ps256(total[0]), _mm512_castps512_ps256(p[n]));
            total[0] = _mm512_castps256_ps512(_mm256_add_ps(sum, later));
          } else {
            total[columns == 8 ? n : 0] = add(total[columns == 8 ? n : 0], p[n]);
          }
        }
        rows[k] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0]));
      }
      separate(rows);
      for (int64_t i = 0; i < columns; ++i) _mm512_store_si512(weights_ + half * 256 + i * 16, rows[i]);
    }
    if constexpr (columns == 2) {
      const Vec both = _mm512_shuffle_f32x4(total[0], total[0], 0x44), half = add(both, _mm512_shuffle_f32x4(both, both, 0xb1));
      return add(half, _mm512_permute_ps(half, 0x4e));
    }
    return over_tokens<columns>(columns == 8 ? add(total[0], total[1]) : total[0], [](Vec a, Vec b) { return add(a, b); });
  }

  // From (32 tokens, column) to rows of columns.
  template <size_t columns>
  static void separate(__m512i (&x)[columns]) {
    alignas(64) static constexpr uint16_t order[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                       32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const __m512i even = _mm512_load_si512(order), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    __m512i y[columns];
    for (size_t span = 1; span < columns; span *= 2) {
      for (size_t i = 0; i < columns / 2; ++i) {
        y[i] = _mm512_permutex2var_epi16(x[2 * i], even, x[2 * i + 1]);
        y[i + columns / 2] = _mm512_permutex2var_epi16(x[2 * i], odd, x[2 * i + 1]);
      }
      std::copy_n(y, columns, x);
    }
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
  void multiply_values(const uint32_t* weights, float* acc) const {
    int64_t d = 0;
    for (; d + 64 <= head_dim_; d += 64) multiply_values_at<4>(weights, acc, d);
    if (head_dim_ - d == 48) multiply_values_at<3>(weights, acc, d);
    if (head_dim_ - d == 32) multiply_values_at<2>(weights, acc, d);
    if (head_dim_ - d == 16) multiply_values_at<1>(weights, acc, d);
  }

  // Half of the rows of 16 dimensions of the next tile of queries: the L1 cache has no room for all tiles'.
  void ask_next(const float* acc, int64_t half, int64_t d) const {
    const float* row = acc + (16 + half % 2 * 8) * head_dim_ + d;
    SAGE_UNROLL for (int64_t i = 0; i < 8; ++i) prefetch(row + i * head_dim_);
  }

  // 16 * columns dimensions from d on
  template <int columns>
  void multiply_values_at(const uint32_t* weights, float* acc, int64_t d) const {
    finish_writes();
    const int64_t step = head_dim_ * 4;
    float* at = acc + d;
    _tile_loadd(0, at, step);
    if constexpr (columns > 1) _tile_loadd(1, at + 16, step);
    if constexpr (columns > 2) _tile_loadd(2, at + 32, step);
    if constexpr (columns > 3) _tile_loadd(3, at + 48, step);
    for (int64_t half = first_ / 2; half < (last_ + 1) / 2; ++half) {
      const uint32_t* value = values_ + half * 16 * head_dim_ + d;
      ask_next(acc, half, d);
      _tile_loadd(4, weights + half * 256, 64);
      _tile_loadd(5, value, step);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (columns > 1) {
        ask_next(acc, half, d + 16);
        _tile_loadd(6, value + 16, step);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (columns > 2) {
        ask_next(acc, half, d + 32);
        _tile_loadd(7, value + 32, step);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (columns > 3) {
        ask_next(acc, half, d + 48);
        _tile_loadd(5, value + 48, step);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, at, step);
    if constexpr (columns > 1) _tile_stored(1, at + 16, step);
    if constexpr (columns > 2) _tile_stored(2, at + 32, step);
    if constexpr (columns > 3) _tile_stored(3, at + 48, step);
  }

  // The same of few queries and 32 tokens.
  void multiply_values_few(int64_t half, float* acc) const {
    finish_writes();
    const int64_t step = head_dim_ * 4;
    _tile_loadd(5, weights_ + half * 256, 64);
    for (int64_t d = 0; d < head_dim_; d += 32) {
      const int64_t e = std::min(d + 16, head_dim_ - 16);  // the same as d where that is the last
      ahead_->rows(2);
      _tile_loadd(6, acc + d, step);
      _tile_loadd(3, values_ + d, step);
      _tile_dpbf16ps(6, 5, 3);
      ahead_->rows(2);
      _tile_loadd(7, acc + e, step);
      _tile_loadd(4, values_ + e, step);
      _tile_dpbf16ps(7, 5, 4);
      _tile_stored(6, acc + d, step);
      _tile_stored(7, acc + e, step);
    }
  }

  const KV& kv_;
  Scoring scoring_;
  int64_t head_dim_, padded_;
  TileConfig config_;
  Prefetch* ahead_ = nullptr;
  bool is_narrow_ = false;  // all queries of a head in few columns of one tile
  int64_t columns_ = 16;
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
