// Attention by AMX tiles over int8 KV. Upper and lower bytes of queries, and of weights, are multiplied in tiles of their own.
#pragma once
#include <utility>

#include "attention_amx_tile.h"
#include "attention_vnni_int8.h"

namespace sage::attention_detail {

// The few queries of a decode would leave most of a tile empty: AVX-512's products, in the same arithmetic, read KV as
// memory lies.
class AmxInt8Kernel : Int8Softmax {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    const int64_t padded = round_up(head_dim, 64);
    const int64_t many = kMaxQueries * (padded * 2 + 4) + 2 * kTileTokens * padded + 2 * kProductBytes + kMaxQueries / 16 * kWeightBytes + kMaxQueries * 4 + 2 * 16 * padded * 4;
    return std::max(many, VnniInt8Kernel::scratch_bytes(head_dim));
  }

  AmxInt8Kernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : Int8Softmax(scoring, head_dim), kv_(kv), padded_(round_up(head_dim, 64)),
        reads_keys_in_place_(kv.block_size % 16 == 0), few_(kv, scoring, head_dim, scratch) {
    const auto take = [&scratch](int64_t bytes) { return std::exchange(scratch, scratch + bytes); };
    queries_ = take(kMaxQueries * padded_ * 2);
    query_units_ = reinterpret_cast<float*>(take(kMaxQueries * 4));
    keys_ = take(kTileTokens * padded_);
    values_ = take(kTileTokens * padded_);
    for (int32_t*& products : products_) products = reinterpret_cast<int32_t*>(take(kProductBytes));
    weights_ = take(kMaxQueries / 16 * kWeightBytes);
    weight_units_ = reinterpret_cast<float*>(take(kMaxQueries * 4));
    sums_ = reinterpret_cast<int32_t*>(take(2 * 16 * padded_ * 4));
    TileConfig().load();
  }

  ~AmxInt8Kernel() { _tile_release(); }
  AmxInt8Kernel(const AmxInt8Kernel&) = delete;
  AmxInt8Kernel& operator=(const AmxInt8Kernel&) = delete;

  // Cuts the queries into bytes and packs those of each tile as (part, four dimensions, query, 4).
  void set_queries(const Queries& queries) {
    is_few_ = queries.count <= kFewQueries;
    if (is_few_) return few_.set_queries(queries);
    for (int64_t h = 0; h < queries.num_heads; ++h) {
      for (int64_t at = 0; at < queries.stride; at += 16) {
        const int64_t q = h * queries.stride + at;
        pack_queries(queries.query + q, std::min<int64_t>(16, queries.count - at), query_units_ + q, queries_ + q * padded_ * 2);
      }
    }
  }

  void sort_dimensions(float*) const {}  // they are in order

  // Brings a tile into the softmax of all heads' queries.
  void add_tile(const Queries& queries, KVTile& tile, const KVTile* following) {
    if (is_few_) return few_.add_tile(queries, tile, following);
    for_heads(kv_, head_dim_, queries, tile, following, [&](int64_t head, Prefetch& ahead) { add_head(queries, head, tile, ahead); });
  }

 private:
  void add_head(const Queries& queries, int64_t head, const KVTile& tile, Prefetch& ahead) {
    ahead_ = &ahead;
    first_ = tile.begin / 16;
    last_ = (tile.end + 15) / 16;
    const int64_t num_tiles = queries.stride / 16, first_tile = head * num_tiles;
    int64_t at = next_seen(queries, tile, 0, num_tiles);
    if (at == num_tiles) return;
    find_keys(tile);
    const int64_t first_at = at;
    multiply_keys(first_tile + at, products_[0]);
    for (int64_t turn = 0; at < num_tiles; turn ^= 1) {
      // The next products run while this softmax does.
      const int64_t next = next_seen(queries, tile, at + 1, num_tiles);
      if (next < num_tiles) multiply_keys(first_tile + next, products_[turn ^ 1]);
      add_products(queries, head, at, tile, products_[turn]);
      at = next;
    }
    // Only then the values: the L1 cache has no room for both.
    pack_values(tile);
    for (at = first_at; at < num_tiles; at = next_seen(queries, tile, at + 1, num_tiles)) {
      multiply_values(weights_ + at * kWeightBytes);
      const int64_t count = std::min<int64_t>(16, queries.count - at * 16), q = head * queries.stride + at * 16;
      add_sums(weight_units_ + at * 16, count, queries.softmax.acc + q * head_dim_);
    }
    ahead.rows(2 * kTileTokens);
  }

  static constexpr int64_t kFewQueries = 8;
  static constexpr int64_t kProductBytes = 2 * kTileTokens * 16 * 4;  // (part, token, query)
  static constexpr int64_t kWeightBytes = 2 * 16 * kTileTokens;       // (part, query, token)

  const unsigned char* packed_queries(int64_t query_tile) const { return queries_ + query_tile * 16 * padded_ * 2; }

  void pack_queries(const float* const* query, int64_t count, float* units, unsigned char* to) const {
    alignas(16) float per_unit[16];
    for (int64_t i = 0; i < count; ++i) per_unit[i] = per_unit_of(query[i], units[i]);
    alignas(64) unsigned char rows[2 * 16 * 64] = {};  // of parts of queries, 64 dimensions
    for (int64_t d = 0; d < padded_; d += 64) {
      for (int64_t i = 0; i < count; ++i) {
        unsigned char* upper = rows + i * 64;
        cut_query(query[i] + d, std::min<int64_t>(64, head_dim_ - d), all(per_unit[i]), upper, upper + 16 * 64);
      }
      transpose_rows(rows, to + d * 16);
      transpose_rows(rows + 16 * 64, to + (d + padded_) * 16);
    }
  }

  static void transpose_rows(const unsigned char* rows, unsigned char* to) {
    __m512i x[16];
    for (int64_t i = 0; i < 16; ++i) x[i] = _mm512_load_si512(rows + i * 64);
    transpose(x);
    for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, x[i]);
  }

  // Where each 16 tokens' keys are. Those that are not the sequence's may be anything, as may what follows the last
  // dimension: it meets zeros in the queries.
  void find_keys(const KVTile& tile) {
    key_step_ = reads_keys_in_place_ ? kv_.token : padded_;
    for (int64_t u = first_; u < last_; ++u) {
      const int64_t known = std::max(tile.begin, u * 16);
      if (reads_keys_in_place_) {
        key_[u] = tile.key[known] - (known - u * 16) * kv_.token;
        continue;
      }
      key_[u] = keys_ + u * 16 * key_step_;
      for (int64_t t = known; t < std::min(tile.end, u * 16 + 16); ++t) {
        std::memcpy(keys_ + t * key_step_, tile.key[t], static_cast<size_t>(head_dim_));
      }
    }
  }

  // Packs values as (four tokens, dimension, 4), the fours in the order in which `store_weights` leaves weights.
  void pack_values(const KVTile& tile) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t u = first_; u < last_; ++u) {
      for (int64_t k = 0; k < 4; ++k) {
        ahead_->rows(8);
        const unsigned char* const* token = tile.value + u * 16 + k * 4;
        unsigned char* to = values_ + (k * 4 + u) * padded_ * 4;
        for (int64_t d = 0; d < head_dim_; d += 64) {
          const __mmask16 in_head = static_cast<__mmask16>((1u << std::min<int64_t>(16, (head_dim_ - d) / 4)) - 1);
          // Fours of dimensions go where interleaving puts them back in order.
          __m512i x[4];
          for (int64_t i = 0; i < 4; ++i) {
            x[i] = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi32(in_head, token[i] + d));
          }
          const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
          const __m512i c = _mm512_unpackhi_epi8(x[0], x[1]), e = _mm512_unpackhi_epi8(x[2], x[3]);
          _mm512_storeu_si512(to + d * 4, _mm512_unpacklo_epi16(a, b));
          _mm512_storeu_si512(to + d * 4 + 64, _mm512_unpackhi_epi16(a, b));
          _mm512_storeu_si512(to + d * 4 + 128, _mm512_unpacklo_epi16(c, e));
          _mm512_storeu_si512(to + d * 4 + 192, _mm512_unpackhi_epi16(c, e));
        }
      }
    }
  }

  // products = keys . parts of the queries of one tile
  void multiply_keys(int64_t query_tile, int32_t* products) const {
    finish_writes();
    const unsigned char* query = packed_queries(query_tile);
    for (int64_t u = first_; u < last_; u += 2) multiply_keys(query, u, std::min(u + 1, last_ - 1), products);
  }

  // Of 16 tokens each.
  void multiply_keys(const unsigned char* query, int64_t u, int64_t v, int32_t* products) const {
    const unsigned char* lower = query + 16 * padded_;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < padded_; d += 64) {
      _tile_loadd(4, query + d * 16, 64);
      _tile_loadd(6, key_[u] + d, key_step_);
      _tile_dpbssd(0, 6, 4);
      _tile_loadd(5, lower + d * 16, 64);
      _tile_dpbssd(1, 6, 5);
      _tile_loadd(7, key_[v] + d, key_step_);
      _tile_dpbssd(2, 7, 4);
      _tile_dpbssd(3, 7, 5);
    }
    _tile_stored(0, products + u * 256, 64);
    _tile_stored(1, products + kTileTokens * 16 + u * 256, 64);
    _tile_stored(2, products + v * 256, 64);
    _tile_stored(3, products + kTileTokens * 16 + v * 256, 64);
  }

  // Brings a tile's products into the softmax of one tile of queries.
  void add_products(const Queries& queries, int64_t head, int64_t at, const KVTile& tile, const int32_t* products) {
    const int64_t count = std::min<int64_t>(16, queries.count - at * 16), q = head * queries.stride + at * 16;
    alignas(64) int32_t dots[16 * kTileTokens];  // (query, token)
    for (int64_t u = first_; u < last_; ++u) join(products + u * 256, dots + u * 16);
    for (int64_t i = 0; i < count; i += 4) {
      unsigned char* upper = weights_ + at * kWeightBytes + i * kTileTokens;
      const Weights to = {upper, upper + 16 * kTileTokens, weight_units_ + at * 16 + i};
      weigh(queries, at * 16 + i, q + i, std::min<int64_t>(4, count - i), tile, dots + i * kTileTokens, to);
    }
  }

  // 16 tokens' products: 256 * upper + lower part, transposed to (query, kTileTokens).
  static void join(const int32_t* products, int32_t* to) {
    __m512i x[16];
    for (int64_t t = 0; t < 16; ++t) {
      x[t] = joined(_mm512_load_si512(products + t * 16), _mm512_load_si512(products + kTileTokens * 16 + t * 16));
    }
    transpose(x);
    for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + i * kTileTokens, x[i]);
  }

  // sums (part, query, dimension) = parts of the weights . values
  void multiply_values(const unsigned char* weights) const {
    finish_writes();
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + kWeightBytes / 2, 64);
    for (int64_t d = 0; d < head_dim_; d += 32) multiply_values(d, std::min(d + 16, head_dim_ - 16));
  }

  // Of 16 dimensions from d and from e on. Unlike weights, values have a sign.
  void multiply_values(int64_t d, int64_t e) const {
    const int64_t step = padded_ * 4;
    int32_t* lower = sums_ + 16 * padded_;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(6, values_ + d * 4, step);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 5, 6);
    _tile_loadd(7, values_ + e * 4, step);
    _tile_dpbusd(2, 4, 7);
    _tile_dpbusd(3, 5, 7);
    _tile_stored(0, sums_ + d, step);
    _tile_stored(1, lower + d, step);
    _tile_stored(2, sums_ + e, step);
    _tile_stored(3, lower + e, step);
  }

  void add_sums(const float* units, int64_t count, float* acc) const {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t *upper = sums_ + i * padded_, *lower = upper + 16 * padded_;
      const Vec unit = all(units[i]);
      for (int64_t d = 0; d < head_dim_; d += 16) {
        prefetch(acc + (16 + i) * head_dim_ + d);  // of the next tile of queries
        const __m512i sum = joined(_mm512_load_si512(upper + d), _mm512_load_si512(lower + d));
        store(acc + i * head_dim_ + d, fma(_mm512_cvtepi32_ps(sum), unit, load(acc + i * head_dim_ + d)));
      }
    }
  }

  const KV& kv_;
  int64_t padded_;
  Prefetch* ahead_ = nullptr;
  bool is_few_ = false, reads_keys_in_place_;
  VnniInt8Kernel few_;
  int64_t first_ = 0, last_ = 0, key_step_ = 0;  // the tile's groups of 16 tokens that have any
  unsigned char* queries_;
  unsigned char *keys_, *values_;
  int32_t* products_[2];
  unsigned char* weights_;  // of each tile of queries
  float* weight_units_;
  int32_t* sums_;
  const unsigned char* key_[4];
};

}  // namespace sage::attention_detail
