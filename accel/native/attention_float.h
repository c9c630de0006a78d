// Attention in float32 over KV of any kind: every value is widened exactly. The base that all builds have.
#pragma once
#include "attention_tile.h"

namespace sage::attention_detail {

template <KVKind kind>
class FloatKernel {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    return (kMaxQueries * kTileTokens + 2 * kTileTokens * head_dim) * static_cast<int64_t>(sizeof(float));
  }

  FloatKernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : kv_(kv), scoring_(scoring), head_dim_(head_dim) {
    scores_ = reinterpret_cast<float*>(scratch);
    keys_ = scores_ + kMaxQueries * kTileTokens;
    values_ = keys_ + kTileTokens * head_dim;
  }

  void set_queries(const Queries&) {}

  void sort_dimensions(float*) const {}  // they are in order

  // Brings a tile into the softmax of all heads' queries.
  void add_tile(const Queries& queries, KVTile& tile, const KVTile* following) {
    for_heads(kv_, head_dim_, queries, tile, following, [&](int64_t head, Prefetch& ahead) { add_head(queries, head, tile, ahead); });
  }

 private:
  static constexpr int64_t kWorthWidening = 8;  // queries; for fewer, values are widened where they are used
  static constexpr int64_t kRows = kLanes == 16 ? 4 : 2;  // queries that share each value loaded: as registers allow
  static constexpr int64_t kTokens = 4;

  void add_head(const Queries& queries, int64_t head, const KVTile& tile, Prefetch& ahead) {
    ahead_ = &ahead;
    const int64_t begin = head * queries.stride;
    if (kind == KVKind::f32 || queries.count < kWorthWidening) {
      add<kind>(queries, begin, tile, tile.key, tile.value);
    } else {
      const unsigned char *keys[kTileTokens], *values[kTileTokens];
      widen(tile, keys, values);
      add<KVKind::f32>(queries, begin, tile, keys, values);
    }
  }

  void widen(const KVTile& tile, const unsigned char** keys, const unsigned char** values) {
    for (int64_t t = 0; t < kTileTokens; ++t) {
      keys[t] = values[t] = kZeros;
      if (t < tile.begin || t >= tile.end) continue;
      float *key = keys_ + t * head_dim_, *value = values_ + t * head_dim_;
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        store(key + d, load_as_float<kind>(tile.key[t], d));
        store(value + d, load_as_float<kind>(tile.value[t], d));
      }
      keys[t] = reinterpret_cast<const unsigned char*>(key);
      values[t] = reinterpret_cast<const unsigned char*>(value);
    }
  }

  template <KVKind as>
  void add(const Queries& queries, int64_t begin, const KVTile& tile, const unsigned char* const* keys,
           const unsigned char* const* values) {
    int64_t i = 0;
    for (; i + kRows <= queries.count; i += kRows) add_rows<as, kRows>(queries, begin, i, tile, keys, values);
    if constexpr (kRows == 4) {
      if (i + 2 <= queries.count) {
        add_rows<as, 2>(queries, begin, i, tile, keys, values);
        i += 2;
      }
    }
    if (i < queries.count) add_rows<as, 1>(queries, begin, i, tile, keys, values);
  }

  template <KVKind as, int64_t rows>
  void add_rows(const Queries& queries, int64_t begin, int64_t i, const KVTile& tile, const unsigned char* const* keys,
                const unsigned char* const* values) {
    int64_t low[rows], high[rows], from = kTileTokens, to = 0;
    for (int64_t r = 0; r < rows; ++r) {
      low[r] = std::max(tile.begin, queries.low[i + r] - tile.first);
      high[r] = std::min(tile.end, queries.high[i + r] - tile.first);
      from = std::min(from, low[r]);
      to = std::max(to, high[r]);
    }
    if (from >= to) return;
    from = from / kTokens * kTokens;
    float* products = scores_ + i * kTileTokens;
    score<as, rows>(queries.query + begin + i, keys, from, to, products);
    const Softmax& softmax = queries.softmax;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t q = begin + i + r;
      softmax_row(scoring_, products + r * kTileTokens, low[r], high[r], kind == KVKind::int8 ? &tile : nullptr,
                  softmax.m[q], softmax.l[q], softmax.acc + q * head_dim_, head_dim_);
    }
    accumulate<as, rows>(products, values, from, to, softmax.acc + (begin + i) * head_dim_);
  }

  // products[row][token] = query . key, each in the same order of additions whatever `rows` is.
  template <KVKind as, int64_t rows>
  void score(const float* const* query, const unsigned char* const* keys, int64_t from, int64_t to,
             float* products) const {
    for (int64_t t = from; t < to; t += kTokens) {
      Vec total[rows][kTokens];
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t k = 0; k < kTokens; ++k) total[r][k] = zero();
      }
      ahead_->rows(kTokens);
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        Vec q[rows];
        for (int64_t r = 0; r < rows; ++r) q[r] = load(query[r] + d);
        for (int64_t k = 0; k < kTokens; ++k) {
          const Vec key = load_as_float<as>(keys[t + k], d);
          for (int64_t r = 0; r < rows; ++r) total[r][k] = fma(q[r], key, total[r][k]);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        _mm_storeu_ps(products + r * kTileTokens + t, sums(total[r][0], total[r][1], total[r][2], total[r][3]));
      }
    }
  }

  // acc[row] += sum over tokens of weight[row][token] * value, token after token.
  template <KVKind as, int64_t rows>
  void accumulate(const float* weights, const unsigned char* const* values, int64_t from, int64_t to,
                  float* acc) const {
    for (int64_t t = from; t < to; t += kTokens) {
      Vec weight[rows][kTokens];
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t k = 0; k < kTokens; ++k) weight[r][k] = all(weights[r * kTileTokens + t + k]);
      }
      ahead_->rows(kTokens);
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        Vec value[kTokens];
        for (int64_t k = 0; k < kTokens; ++k) value[k] = load_as_float<as>(values[t + k], d);
        for (int64_t r = 0; r < rows; ++r) {
          Vec total = load(acc + r * head_dim_ + d);
          for (int64_t k = 0; k < kTokens; ++k) total = fma(weight[r][k], value[k], total);
          store(acc + r * head_dim_ + d, total);
        }
      }
    }
  }

  const KV& kv_;
  Scoring scoring_;
  int64_t head_dim_;
  float *scores_, *keys_, *values_;
  Prefetch* ahead_ = nullptr;
};

}  // namespace sage::attention_detail
