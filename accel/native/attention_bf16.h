// Attention by AVX-512's products of bf16 pairs, with float32 sums, over KV in bf16, or in fp8 that is widened to it.
#pragma once
#include "attention_avx512.h"
#include "attention_heads.h"

namespace sage::attention_detail {

// Rows of two tokens: dimensions [d, d + 32) of both, (dimension, 2), in two vectors.
inline void interleave(__m512i a, __m512i b, __m512i (&to)[2]) {
  alignas(64) static constexpr uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first_half = _mm512_load_si512(order), second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
  to[0] = _mm512_permutex2var_epi16(a, first_half, b);
  to[1] = _mm512_permutex2var_epi16(a, second_half, b);
}

// Few queries are multiplied with keys and values where these lie; for more, keys are transposed, values interleaved, and
// what comes out is in one vector for 16 tokens. Sums are taken in the same order.
template <KVKind kind>
class Bf16Kernel : TileSoftmax {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    const int64_t padded = round_up(head_dim, 32);
    return kMaxQueries * (padded * 2 + kTileTokens * 4) + (is_scaled(kind) ? 4 : 3) * kTileTokens * padded * 2;
  }

  Bf16Kernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : TileSoftmax(scoring, head_dim), kv_(kv), padded_(round_up(head_dim, 32)) {
    const auto take = [&scratch](int64_t bytes) { return std::exchange(scratch, scratch + bytes); };
    queries_ = take(kMaxQueries * padded_ * 2);
    scores_ = reinterpret_cast<float*>(take(kMaxQueries * kTileTokens * 4));
    keys_ = reinterpret_cast<uint32_t*>(take(kTileTokens * padded_ * 2));
    values_ = reinterpret_cast<uint32_t*>(take(kTileTokens * padded_ * 2));
    copies_ = take(kTileTokens * padded_ * 2);
    if (is_scaled(kind)) wide_ = take(kTileTokens * padded_ * 2);
  }

  // Rounds the queries to bf16.
  void set_queries(const Queries& queries) {
    for (int64_t h = 0; h < queries.num_heads; ++h) {
      for (int64_t q = h * queries.stride; q < h * queries.stride + queries.count; ++q) {
        unsigned char* to = queries_ + q * padded_ * 2;
        std::memset(to, 0, static_cast<size_t>(padded_ * 2));
        for (int64_t d = 0; d < head_dim_; d += 16) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d * 2),
                              reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(queries.query[q] + d))));
        }
      }
    }
  }

  void sort_dimensions(float*) const {}  // they are in order

  // Brings a tile into the softmax of all heads' queries.
  void add_tile(const Queries& queries, KVTile& tile, const KVTile* following) {
    Pieces pieces(kv_, head_dim_ * value_bytes(kind), queries, tile, following, copies_);
    if (queries.count <= kFewQueries) return add_to_few(queries, tile, pieces);
    for (int64_t head = 0; head < queries.num_heads; ++head) {
      pieces.for_keys_of(head, [&](const Piece& stored) {
        const Piece piece = in_bf16(stored, tile, queries.first_head + head, false);
        for (int64_t t = piece.begin; t < piece.end; t += 16) {
          transpose_keys(piece, t);
          for_few<4>(queries.count, [&](auto rows, int64_t i) {
            const Seen<rows> seen(queries, i, tile, t, t + 16);
            if (seen.any()) score_transposed<rows>(head * queries.stride + i, t);
          });
        }
      });
      weigh(queries, head, tile);
      pieces.for_values_of(head, [&](const Piece& stored) {
        interleave_values(in_bf16(stored, tile, queries.first_head + head, true));
      });
      for_few<4>(queries.count, [&](auto rows, int64_t i) {
        const Seen<rows> seen(queries, i, tile, 0, kTileTokens);
        if (seen.any()) accumulate<rows, false>(queries, head * queries.stride + i, seen.from, seen.to, Piece{});
      });
    }
  }

 private:
  static constexpr int64_t kFewQueries = 8;

  void add_to_few(const Queries& queries, const KVTile& tile, Pieces& pieces) {
    pieces.for_keys([&](int64_t head, const Piece& stored) {
      const Piece piece = in_bf16(stored, tile, queries.first_head + head, false);
      for_few<4>(queries.count, [&](auto rows, int64_t i) {
        const Seen<rows> seen(queries, i, tile, piece.begin, piece.end);
        score<rows>(head * queries.stride + i, piece, seen.from, seen.to, i == 0 ? piece.ahead : piece.rows);
      });
    });
    for (int64_t head = 0; head < queries.num_heads; ++head) weigh(queries, head, tile);
    pieces.for_values([&](int64_t head, const Piece& stored) {
      const Piece piece = in_bf16(stored, tile, queries.first_head + head, true);
      for_few<4>(queries.count, [&](auto rows, int64_t i) {
        const Seen<rows> seen(queries, i, tile, piece.begin, piece.end);
        if (!seen.any()) return;
        const Piece again{piece.begin, piece.end, piece.rows, piece.rows};  // the first have asked for what is ahead
        accumulate<rows, true>(queries, head * queries.stride + i, seen.from, seen.to, i == 0 ? piece : again);
      });
    });
  }

  // A piece of a head's keys or values as rows of bf16.
  Piece in_bf16(const Piece& piece, const KVTile& tile, int64_t head, bool is_value) const {
    if constexpr (!is_scaled(kind)) return piece;
    const unsigned char *from = piece.rows, *ahead = piece.ahead;
    unsigned char* to = wide_;
    for (int64_t t = piece.begin; t < piece.end; ++t) {
      const Widening widen(t >= tile.begin && t < tile.end ? *tile.scales_of(kv_, t, head, is_value) : 0.0f);
      for (int64_t d = 0; d < head_dim_; d += 64) prefetch_far(ahead + d);
      int64_t d = 0;
      for (; d + 32 <= head_dim_; d += 32) {
        _mm512_storeu_si512(to + d * 2, widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d))));
      }
      // This goes beyond the row: the next is written after it.
      if (d < head_dim_) _mm512_storeu_si512(to + d * 2, widen(_mm256_maskz_loadu_epi8(0xffff, from + d)));
      from += head_dim_;
      ahead += head_dim_;
      to += head_dim_ * 2;
    }
    return {piece.begin, piece.end, wide_, wide_};
  }

  // The intrinsic makes g++ 12 spill its sums.
  static Vec add_products(Vec sum, __m512i a, __m512i b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }

  __mmask32 in_head(int64_t d) const { return d + 32 <= head_dim_ ? 0xffffffff : 0xffff; }

  // Products of a head's queries become weights: 64 tokens in 32 pairs of bf16, in the same place.
  void weigh(const Queries& queries, int64_t head, const KVTile& tile) const {
    for (int64_t n = 0; n < queries.count; n += 4) {
      const int64_t count = std::min<int64_t>(4, queries.count - n), q = head * queries.stride + n;
      bool is_whole = count == 4 && tile.begin == 0 && tile.end == kTileTokens;
      for (int64_t k = 0; k < count; ++k) {
        is_whole &= queries.low[n + k] <= tile.first && queries.high[n + k] >= tile.first + kTileTokens;
      }
      is_whole ? weigh<true>(queries, n, q, 4, tile) : weigh<false>(queries, n, q, count, tile);
    }
  }

  // Of up to four queries; whole: of four that see all tokens.
  template <bool whole>
  void weigh(const Queries& queries, int64_t n, int64_t q, int64_t count, const KVTile& tile) const {
    __mmask16 seen[4][4];
    Vec top[4], total[4];
    SAGE_UNROLL for (int64_t k = 0; k < 4; ++k) {
      top[k] = all(kNone);
      total[k] = zero();
    }
    SAGE_UNROLL for (int64_t k = 0; k < 4; ++k) {
      if (!whole && k >= count) break;
      if constexpr (!whole) set_seen(queries.low[n + k], queries.high[n + k], tile, seen[k]);
      float* row = scores_ + (q + k) * kTileTokens;
      SAGE_UNROLL for (int64_t u = 0; u < 4; ++u) {
        Vec x = mul(load(row + u * 16), all(scoring_.scale));
        if (scoring_.soft_cap != 0.0f) x = mul(all(scoring_.soft_cap), tanh(x));
        top[k] = whole ? max(top[k], x) : _mm512_mask_max_ps(top[k], seen[k][u], top[k], x);
        store(row + u * 16, x);
      }
    }
    raise_maxima(queries.softmax, q, count, maxima<false>(top));
    SAGE_UNROLL for (int64_t k = 0; k < 4; ++k) {
      if (!whole && k >= count) break;
      float* row = scores_ + (q + k) * kTileTokens;
      const Vec m = all(queries.softmax.m[q + k]);
      Vec p[4];
      SAGE_UNROLL for (int64_t u = 0; u < 4; ++u) {
        p[u] = weight_of(sub(load(row + u * 16), m));
        if constexpr (!whole) p[u] = _mm512_maskz_mov_ps(seen[k][u], p[u]);
        total[k] = add(total[k], p[u]);
      }
      SAGE_UNROLL for (int64_t u = 0; u < 4; u += 2) {
        _mm512_storeu_si512(row + u * 8, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[u + 1], p[u])));
      }
    }
    // The arrays have room for all 16 queries of a tile.
    float* l = queries.softmax.l + q;
    _mm_storeu_ps(l, _mm_add_ps(_mm_loadu_ps(l), sums(total[0], total[1], total[2], total[3])));
  }

  // Rows are read one after the other, as processors foresee it best.
  template <int64_t rows, int64_t parts>
  void score_rows(int64_t q, const Piece& piece, int64_t from, int64_t to, const unsigned char* ahead) const {
    const int64_t row_bytes = parts > 0 ? parts * 64 : head_dim_ * 2, query_bytes = parts > 0 ? parts * 64 : padded_ * 2;
    const unsigned char* queries = queries_ + q * query_bytes;
    float* scores = scores_ + q * kTileTokens;
    const int64_t first = (from - piece.begin) * row_bytes;
    const unsigned char *key = piece.rows + first, *next = ahead + first;
    for (int64_t t = from; t < to; t += 4) {
      Vec sum[rows][4];
      SAGE_UNROLL for (int64_t k = 0; k < 4; ++k) {
        SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) sum[r][k] = zero();
        SAGE_UNROLL for (int64_t at = 0; at < row_bytes; at += 64) {
          const __mmask32 in_part = parts > 0 ? 0xffffffff : in_head(at / 2);
          const __m512i part = _mm512_maskz_loadu_epi16(in_part, key + at);
          prefetch_far(next + at);
          SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
            sum[r][k] = add_products(sum[r][k], part, _mm512_loadu_si512(queries + r * query_bytes + at));
          }
        }
        key += row_bytes;
        next += row_bytes;
      }
      SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
        _mm_storeu_ps(scores + r * kTileTokens + t, sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
      }
    }
  }

  template <int64_t rows>
  void score(int64_t q, const Piece& piece, int64_t from, int64_t to, const unsigned char* ahead) const {
    switch (head_dim_) {  // the usual lengths
      case 64: return score_rows<rows, 2>(q, piece, from, to, ahead);
      case 128: return score_rows<rows, 4>(q, piece, from, to, ahead);
      default: return score_rows<rows, 0>(q, piece, from, to, ahead);
    }
  }

  // keys (pair of dimensions, token, 2), of 16 tokens
  void transpose_keys(const Piece& piece, int64_t t) const {
    const int64_t first = (t - piece.begin) * head_dim_ * 2;
    const unsigned char *keys = piece.rows + first, *next = piece.ahead + first;
    for (int64_t d = 0; d < head_dim_; d += 32) {
      __m512i x[16];
      SAGE_UNROLL for (int64_t i = 0; i < 16; ++i) {
        x[i] = _mm512_maskz_loadu_epi16(in_head(d), keys + (i * head_dim_ + d) * 2);
        prefetch_far(next + (i * head_dim_ + d) * 2);
      }
      transpose(x);
      SAGE_UNROLL for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(keys_ + (d / 2 + i) * 16, x[i]);
    }
  }

  // Scores of 16 tokens, summed up as `score` and `sums` do: lane by lane over the head, then these in a tree.
  template <int64_t rows>
  void score_transposed(int64_t q, int64_t t) const {
    Vec sum[rows];
    const uint32_t* query = reinterpret_cast<const uint32_t*>(queries_) + q * padded_ / 2;
    switch (padded_ / 32) {  // the usual lengths
      case 2: add_lanes<rows, 2, 16, 0>(query, sum); break;
      case 4: add_lanes<rows, 4, 16, 0>(query, sum); break;
      default: add_lanes<rows, 0, 16, 0>(query, sum);
    }
    SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) store(scores_ + (q + r) * kTileTokens + t, sum[r]);
  }

  template <int64_t rows, int64_t parts, int64_t count, int64_t first>
  __attribute__((always_inline)) void add_lanes(const uint32_t* query, Vec (&sum)[rows]) const {
    if constexpr (count > 1) {
      add_lanes<rows, parts, count / 2, first>(query, sum);
      Vec other[rows];
      add_lanes<rows, parts, count / 2, first + count / 2>(query, other);
      SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) sum[r] = add(sum[r], other[r]);
    } else {
      constexpr int64_t order[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
      const int64_t num_pairs = parts > 0 ? parts * 16 : padded_ / 2;
      SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) sum[r] = zero();
      SAGE_UNROLL for (int64_t pair = order[first]; pair < num_pairs; pair += 16) {
        const __m512i key = _mm512_loadu_si512(keys_ + pair * 16);
        SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
          asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum[r]) : "v"(key), "m"(query[r * num_pairs + pair]));
        }
      }
    }
  }

  // values (pair of tokens, dimension, 2)
  void interleave_values(const Piece& piece) const {
    for (int64_t t = piece.begin; t < piece.end; t += 2) {
      const int64_t at = (t - piece.begin) * head_dim_ * 2;
      for (int64_t d = 0; d < head_dim_; d += 32) {
        __m512i x[2];
        const unsigned char *even = piece.rows + at + d * 2, *odd = even + head_dim_ * 2;
        interleave(_mm512_maskz_loadu_epi16(in_head(d), even), _mm512_maskz_loadu_epi16(in_head(d), odd), x);
        _mm512_storeu_si512(values_ + t / 2 * padded_ + d, x[0]);
        _mm512_storeu_si512(values_ + t / 2 * padded_ + d + 16, x[1]);
        prefetch_far(piece.ahead + at + d * 2);
        prefetch_far(piece.ahead + at + (head_dim_ + d) * 2);
      }
    }
  }

  // acc[row] += sum over pairs of tokens in [from, to) of weights[row][pair] . values[pair], 16 sums in registers at a time.
  // Values are where they lie, or interleaved.
  template <int64_t rows, bool in_place>
  void accumulate(const Queries& queries, int64_t q, int64_t from, int64_t to, const Piece& piece) const {
    const float* weights = scores_ + q * kTileTokens;
    float* acc = queries.softmax.acc + q * head_dim_;
    constexpr int64_t columns = rows == 1 ? 8 : 16 / rows;
    int64_t d = 0;
    for (; d + 16 * columns <= head_dim_; d += 16 * columns) accumulate_at<rows, columns, in_place>(weights, from, to, piece, acc, d);
    for (; d + 32 <= head_dim_; d += 32) accumulate_at<rows, 2, in_place>(weights, from, to, piece, acc, d);
    if (d < head_dim_) accumulate_at<rows, 1, in_place>(weights, from, to, piece, acc, d);
  }

  template <int64_t rows, int64_t columns, bool in_place>
  void accumulate_at(const float* weights, int64_t from, int64_t to, const Piece& piece, float* acc, int64_t d) const {
    const int64_t dim = head_dim_, row_bytes = dim * 2, padded = padded_;
    acc += d;
    Vec sum[rows][columns];
    SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
      SAGE_UNROLL for (int64_t c = 0; c < columns; ++c) sum[r][c] = load(acc + r * dim + c * 16);
    }
    const int64_t first = from / 2, last = (to + 1) / 2, offset = (first * 2 - piece.begin) * row_bytes + d * 2;
    const unsigned char *row = piece.rows + offset, *next = piece.ahead + offset;
    const uint32_t* values = values_ + first * padded + d;
    for (int64_t pair = first; pair < last; ++pair, row += 2 * row_bytes, next += 2 * row_bytes, values += padded) {
      __m512i weight[rows];
      SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) weight[r] = _mm512_castps_si512(all(weights[r * kTileTokens + pair]));
      if constexpr (in_place) {
        constexpr __mmask32 in_head = columns == 1 ? 0xffff : 0xffffffff;
        __m512i even[(columns + 1) / 2], odd[(columns + 1) / 2];
        SAGE_UNROLL for (int64_t c = 0; c < columns; c += 2) {
          even[c / 2] = _mm512_maskz_loadu_epi16(in_head, row + c * 32);
          prefetch_far(next + c * 32);
        }
        SAGE_UNROLL for (int64_t c = 0; c < columns; c += 2) {
          odd[c / 2] = _mm512_maskz_loadu_epi16(in_head, row + row_bytes + c * 32);
          prefetch_far(next + row_bytes + c * 32);
        }
        SAGE_UNROLL for (int64_t c = 0; c < columns; c += 2) {
          __m512i value[2];
          interleave(even[c / 2], odd[c / 2], value);
          SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
            sum[r][c] = add_products(sum[r][c], value[0], weight[r]);
            if constexpr (columns > 1) sum[r][c + 1] = add_products(sum[r][c + 1], value[1], weight[r]);
          }
        }
      } else {
        SAGE_UNROLL for (int64_t c = 0; c < columns; ++c) {
          const __m512i value = _mm512_loadu_si512(values + c * 16);
          SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) sum[r][c] = add_products(sum[r][c], value, weight[r]);
        }
      }
    }
    SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
      SAGE_UNROLL for (int64_t c = 0; c < columns; ++c) store(acc + r * dim + c * 16, sum[r][c]);
    }
  }

  const KV& kv_;
  int64_t padded_;
  unsigned char* queries_;
  float* scores_;
  uint32_t *keys_, *values_;
  unsigned char *copies_, *wide_ = nullptr;
};

}  // namespace sage::attention_detail
