// Attention in float32 over KV of any kind: every value is widened exactly. The base that all builds have.
#pragma once
#include "attention_heads.h"

namespace sage::attention_detail {

template <KVKind kind>
class FloatKernel {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    return (kMaxQueries * kTileTokens + 2 * kTileTokens * head_dim) * static_cast<int64_t>(sizeof(float));
  }

  FloatKernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : kv_(kv), scoring_(scoring), head_dim_(head_dim), scores_(reinterpret_cast<float*>(scratch)) {
    wide_ = scores_ + kMaxQueries * kTileTokens;
    copies_ = reinterpret_cast<unsigned char*>(wide_ + kTileTokens * head_dim);
  }

  void set_queries(const Queries&) {}

  void sort_dimensions(float*) const {}  // they are in order

  // Brings a tile into the softmax of all heads' queries.
  void add_tile(const Queries& queries, KVTile& tile, const KVTile* following) {
    const bool widens = kind != KVKind::f32 && queries.count >= kWorthWidening;
    Pieces pieces(kv_, row_bytes(), queries, tile, following, copies_);
    pieces.for_keys([&](int64_t head, const Piece& piece) {
      if (kind == KVKind::int8) tile.ask_scales(kv_, queries.first_head + head, piece.begin, piece.end);
      if (widens) widen(piece);
      for_few<kRows>(queries.count, [&](auto rows, int64_t i) {
        const Seen<rows> seen(queries, i, tile, piece.begin, piece.end);
        const int64_t q = head * queries.stride + i;
        if (widens) {
          score<KVKind::f32, rows, false>(queries, q, piece, seen.from, seen.to);
        } else if (i == 0) {
          score<kind, rows, true>(queries, q, piece, seen.from, seen.to);
        } else {
          score<kind, rows, false>(queries, q, piece, seen.from, seen.to);
        }
      });
    });
    for (int64_t head = 0; head < queries.num_heads; ++head) {
      if (is_scaled(kind)) tile.select_scales(kv_, queries.first_head + head);
      for_few<kRows>(queries.count, [&](auto rows, int64_t i) { weigh<rows>(queries, head, i, tile); });
    }
    pieces.for_values([&](int64_t head, const Piece& piece) {
      if (widens) widen(piece);
      for_few<kRows>(queries.count, [&](auto rows, int64_t i) {
        const Seen<rows> seen(queries, i, tile, piece.begin, piece.end);
        if (!seen.any()) return;
        const int64_t q = head * queries.stride + i;
        if (widens) {
          accumulate<KVKind::f32, rows, false>(queries, q, piece, seen.from, seen.to);
        } else if (i == 0) {
          accumulate<kind, rows, true>(queries, q, piece, seen.from, seen.to);
        } else {
          accumulate<kind, rows, false>(queries, q, piece, seen.from, seen.to);
        }
      });
    });
  }

 private:
  static constexpr int64_t kWorthWidening = 8;  // queries; for fewer, values are widened where they are used
  static constexpr int64_t kRows = kLanes == 16 ? 4 : 2;  // queries that share each value loaded: as registers allow
  static constexpr int64_t kTokens = 4;
  static constexpr int64_t kElementBytes = value_bytes(kind);

  int64_t row_bytes() const { return head_dim_ * kElementBytes; }

  // A piece's rows as floats.
  void widen(const Piece& piece) const {
    for (int64_t t = piece.begin; t < piece.end; ++t) {
      const int64_t at = (t - piece.begin) * row_bytes();
      for (int64_t i = 0; i < row_bytes(); i += 64) prefetch_far(piece.ahead + at + i);
      float* to = wide_ + (t - piece.begin) * head_dim_;
      for (int64_t d = 0; d < head_dim_; d += kLanes) store(to + d, load_as_float<kind>(piece.rows + at, d));
    }
  }

  // A token's row of a piece, widened or as it is.
  template <KVKind as>
  const unsigned char* row(const Piece& piece, int64_t t) const {
    if constexpr (as != kind) return reinterpret_cast<const unsigned char*>(wide_ + (t - piece.begin) * head_dim_);
    return piece.rows + (t - piece.begin) * row_bytes();
  }

  // Of queries that `accumulate` takes together some may see nothing: they get weights of 0.
  template <int64_t rows>
  void weigh(const Queries& queries, int64_t head, int64_t i, const KVTile& tile) const {
    const Seen<rows> seen(queries, i, tile, 0, kTileTokens);
    if (!seen.any()) return;
    const Softmax& softmax = queries.softmax;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t q = head * queries.stride + i + r;
      softmax_row(scoring_, scores_ + q * kTileTokens, seen.low[r], seen.high[r], is_scaled(kind) ? &tile : nullptr,
                  softmax.m[q], softmax.l[q], softmax.acc + q * head_dim_, head_dim_);
    }
  }

  // scores[row][token] = query . key, each in the same order of additions whatever `rows` is.
  template <KVKind as, int64_t rows, bool asks>
  void score(const Queries& queries, int64_t q, const Piece& piece, int64_t from, int64_t to) const {
    const unsigned char* ahead = piece.ahead + (from - piece.begin) * row_bytes();
    const float* const* query = queries.query + q;
    float* scores = scores_ + q * kTileTokens;
    for (int64_t t = from; t < to; t += kTokens) {
      Vec total[rows][kTokens];
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t k = 0; k < kTokens; ++k) total[r][k] = zero();
      }
      if constexpr (asks) {
        for (const unsigned char* end = ahead + kTokens * row_bytes(); ahead < end; ahead += 64) prefetch_far(ahead);
      }
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        Vec x[rows];
        for (int64_t r = 0; r < rows; ++r) x[r] = load(query[r] + d);
        for (int64_t k = 0; k < kTokens; ++k) {
          const Vec key = load_as_float<as>(row<as>(piece, t + k), d);
          for (int64_t r = 0; r < rows; ++r) total[r][k] = fma(x[r], key, total[r][k]);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        _mm_storeu_ps(scores + r * kTileTokens + t, sums(total[r][0], total[r][1], total[r][2], total[r][3]));
      }
    }
  }

  // acc[row] += sum over tokens of weight[row][token] * value, token after token, a line of sums in registers at a time.
  template <KVKind as, int64_t rows, bool asks>
  void accumulate(const Queries& queries, int64_t q, const Piece& piece, int64_t from, int64_t to) const {
    constexpr int64_t columns = 32 / kLanes;
    float* acc = queries.softmax.acc + q * head_dim_;
    const float* weights = scores_ + q * kTileTokens;
    int64_t d = 0;
    for (; d + columns * kLanes <= head_dim_; d += columns * kLanes) {
      accumulate_at<as, rows, columns, asks>(weights, piece, from, to, acc, d);
    }
    for (; d < head_dim_; d += kLanes) accumulate_at<as, rows, 1, false>(weights, piece, from, to, acc, d);
  }

  template <KVKind as, int64_t rows, int64_t columns, bool asks>
  void accumulate_at(const float* weights, const Piece& piece, int64_t from, int64_t to, float* acc, int64_t d) const {
    Vec sum[rows][columns];
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) sum[r][c] = load(acc + r * head_dim_ + d + c * kLanes);
    }
    for (int64_t t = from; t < to; ++t) {
      if constexpr (asks) {
        const unsigned char* ahead = piece.ahead + (t - piece.begin) * row_bytes() + d * kElementBytes;
        for (int64_t at = 0; at < 32 * kElementBytes; at += 64) prefetch_far(ahead + at);
      }
      Vec value[columns];
      for (int64_t c = 0; c < columns; ++c) value[c] = load_as_float<as>(row<as>(piece, t), d + c * kLanes);
      for (int64_t r = 0; r < rows; ++r) {
        const Vec weight = all(weights[r * kTileTokens + t]);
        for (int64_t c = 0; c < columns; ++c) sum[r][c] = fma(weight, value[c], sum[r][c]);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) store(acc + r * head_dim_ + d + c * kLanes, sum[r][c]);
    }
  }

  const KV& kv_;
  Scoring scoring_;
  int64_t head_dim_;
  float *scores_, *wide_;
  unsigned char* copies_;
};

}  // namespace sage::attention_detail
