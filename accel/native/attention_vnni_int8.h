// Attention by AVX-512's products of four bytes (VNNI) over int8 KV.
//
// One operand of these products has no sign: keys have 128 added, which 128 times the sum of the query takes off again, and
// weights have no sign anyway.
#pragma once
#include <utility>

#include "attention_heads.h"
#include "attention_int8.h"

namespace sage::attention_detail {

class VnniInt8Kernel : Int8Softmax {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    const int64_t padded = round_up(head_dim, 64);
    return kMaxQueries * (padded * 2 + 12 + kTileTokens * 4 + kTileTokens * 2 + padded * 4) + 3 * kTileTokens * padded;
  }

  VnniInt8Kernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : Int8Softmax(scoring, head_dim), kv_(kv), padded_(round_up(head_dim, 64)) {
    const auto take = [&scratch](int64_t bytes) { return std::exchange(scratch, scratch + bytes); };
    queries_ = take(kMaxQueries * padded_ * 2);
    query_units_ = reinterpret_cast<float*>(take(kMaxQueries * 4));
    query_excess_ = reinterpret_cast<int32_t*>(take(kMaxQueries * 4));
    weight_units_ = reinterpret_cast<float*>(take(kMaxQueries * 4));
    dots_ = reinterpret_cast<int32_t*>(take(kMaxQueries * kTileTokens * 4));
    weights_ = take(kMaxQueries * kTileTokens * 2);
    sums_ = reinterpret_cast<int32_t*>(take(kMaxQueries * padded_ * 4));
    keys_ = take(kTileTokens * padded_);
    values_ = take(kTileTokens * padded_);
    copies_ = take(kTileTokens * padded_);
  }

  // Cuts the queries into bytes: (query, part, dimension).
  void set_queries(const Queries& queries) {
    for (int64_t h = 0; h < queries.num_heads; ++h) {
      for (int64_t q = h * queries.stride; q < h * queries.stride + queries.count; ++q) {
        const Vec per_unit = all(per_unit_of(queries.query[q], query_units_[q]));
        __m512i sum = _mm512_setzero_si512();
        for (int64_t d = 0; d < padded_; d += 64) {
          unsigned char* upper = queries_ + q * 2 * padded_ + d;
          const int64_t count = std::min<int64_t>(64, head_dim_ - d);
          sum = _mm512_add_epi32(sum, cut_query(queries.query[q] + d, count, per_unit, upper, upper + padded_));
        }
        query_excess_[q] = 128 * _mm512_reduce_add_epi32(sum);
      }
    }
  }

  void sort_dimensions(float*) const {}  // they are in order

  // Brings a tile into the softmax of all heads' queries.
  void add_tile(const Queries& queries, KVTile& tile, const KVTile* following) {
    Pieces pieces(kv_, head_dim_, queries, tile, following, copies_);
    if (queries.count <= kFewQueries) return add_to_few(queries, tile, pieces);
    const Piece whole{tile.begin / 16 * 16, tile.end, nullptr, nullptr};
    for (int64_t head = 0; head < queries.num_heads; ++head) {
      pieces.for_keys_of(head, [&](const Piece& piece) {
        tile.ask_scales(kv_, queries.first_head + head, piece.begin, piece.end);
        transpose_keys(piece);
      });
      for_seen(queries, head, tile, [&](auto rows, int64_t q, int64_t to) { score_transposed<rows>(q, whole.begin, to); });
      weigh_head(queries, head, tile);
      pieces.for_values_of(head, [&](const Piece& piece) { pack_values(piece); });
      for_seen(queries, head, tile, [&](auto rows, int64_t q, int64_t to) { accumulate<rows, 0, true>(queries, q, tile, whole, to); });
    }
  }

 private:
  static constexpr int64_t kFewQueries = 8;  // for which keys are not transposed: the lanes of their sums are added up

  void add_to_few(const Queries& queries, KVTile& tile, Pieces& pieces) {
    pieces.for_keys([&](int64_t head, const Piece& piece) {
      tile.ask_scales(kv_, queries.first_head + head, piece.begin, piece.end);
      for_few<2>(queries.count, [&](auto rows, int64_t i) {
        if (!Seen<rows>(queries, i, tile, piece.begin, piece.end).any()) return;
        by_head_dim([&](auto parts) { score<rows, parts>(head * queries.stride + i, piece, i == 0 ? piece.ahead : piece.rows); });
      });
    });
    for (int64_t head = 0; head < queries.num_heads; ++head) weigh_head(queries, head, tile);
    const bool is_packed = queries.count > 2;
    pieces.for_values([&](int64_t head, const Piece& piece) {
      if (is_packed) pack_values(piece);
      for_seen(queries, head, tile, [&](auto rows, int64_t q, int64_t to) {
        if (is_packed) return accumulate<rows, 0, true>(queries, q, tile, piece, to);
        by_head_dim([&](auto parts) { accumulate<rows, parts, false>(queries, q, tile, piece, to); });
      });
    });
  }

  // body(rows, first of them, last token that one of them sees) for a head's queries that see some of a tile.
  template <class Body>
  static void for_seen(const Queries& queries, int64_t head, const KVTile& tile, const Body& body) {
    for_few<2>(queries.count, [&](auto rows, int64_t i) {
      const Seen<rows> seen(queries, i, tile, 0, kTileTokens);
      if (seen.any()) body(rows, head * queries.stride + i, seen.to);
    });
  }

  void weigh_head(const Queries& queries, int64_t head, KVTile& tile) const {
    tile.select_scales(kv_, queries.first_head + head);
    for (int64_t i = 0; i < queries.count; i += 4) {
      const int64_t q = head * queries.stride + i;
      const Weights to = {weights_ + q * kTileTokens, weights_ + (kMaxQueries + q) * kTileTokens, weight_units_ + q};
      weigh(queries, i, q, std::min<int64_t>(4, queries.count - i), tile, dots_ + q * kTileTokens, to);
    }
  }

  // The intrinsic makes g++ 12 spill its sums.
  static __m512i add_products(__m512i sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
    return sum;
  }

  static __m512i load_key(const unsigned char* key, __mmask64 in_head) {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(in_head, key), _mm512_set1_epi8(-128));
  }

  // Constants for the usual lengths of heads.
  template <class Body>
  void by_head_dim(const Body& body) const {
    switch (head_dim_) {
      case 64: return body(std::integral_constant<int64_t, 1>());
      case 128: return body(std::integral_constant<int64_t, 2>());
      default: return body(std::integral_constant<int64_t, 0>());
    }
  }

  template <int64_t parts>
  __m512i load_bytes(const unsigned char* row, int64_t d) const {
    return parts > 0 ? _mm512_loadu_si512(row + d) : _mm512_maskz_loadu_epi8(in_head(d), row + d);
  }

  __mmask64 in_head(int64_t d) const { return d + 64 <= head_dim_ ? ~__mmask64{0} : (__mmask64{1} << (head_dim_ - d)) - 1; }

  static __m128i sums(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }

  // dots (query, token) = queries . keys. Rows are read one after the other, as processors foresee it best.
  template <int64_t rows, int64_t parts>
  void score(int64_t q, const Piece& piece, const unsigned char* ahead) const {
    const int64_t row_bytes = parts > 0 ? parts * 64 : head_dim_, padded = parts > 0 ? parts * 64 : padded_;
    const unsigned char *queries = queries_ + q * 2 * padded, *row = piece.rows;
    for (int64_t t = piece.begin; t < piece.end; t += 4) {
      __m512i sum[2 * rows][4];
      SAGE_UNROLL for (int64_t k = 0; k < 4; ++k) {
        SAGE_UNROLL for (int64_t r = 0; r < 2 * rows; ++r) sum[r][k] = _mm512_setzero_si512();
        SAGE_UNROLL for (int64_t d = 0; d < padded; d += 64) {
          const __m512i key = _mm512_xor_si512(load_bytes<parts>(row, d), _mm512_set1_epi8(-128));
          prefetch_far(ahead + d);
          SAGE_UNROLL for (int64_t r = 0; r < 2 * rows; ++r) {
            sum[r][k] = add_products(sum[r][k], key, _mm512_loadu_si512(queries + r * padded + d));
          }
        }
        row += row_bytes;
        ahead += row_bytes;
      }
      SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
        __m512i(&upper)[4] = sum[2 * r], (&lower)[4] = sum[2 * r + 1];
        const __m128i four = sums(joined(upper[0], lower[0]), joined(upper[1], lower[1]), joined(upper[2], lower[2]),
                                  joined(upper[3], lower[3]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dots_ + (q + r) * kTileTokens + t),
                         _mm_sub_epi32(four, _mm_set1_epi32(query_excess_[q + r])));
      }
    }
  }

  // keys (four dimensions, token, 4)
  void transpose_keys(const Piece& piece) const {
    for (int64_t t = piece.begin; t < piece.end; t += 16) {
      for (int64_t d = 0; d < padded_; d += 64) {
        __m512i x[16];
        SAGE_UNROLL for (int64_t i = 0; i < 16; ++i) {
          const int64_t at = (t + i - piece.begin) * head_dim_ + d;
          x[i] = load_key(piece.rows + at, in_head(d));
          prefetch_far(piece.ahead + at);
        }
        transpose(x);
        SAGE_UNROLL for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(keys_ + ((d / 4 + i) * kTileTokens + t) * 4, x[i]);
      }
    }
  }

  template <int64_t rows>
  void score_transposed(int64_t q, int64_t begin, int64_t end) const {
    if (end - begin > 48) return score_columns<rows, 4>(q, begin);
    for (; end - begin > 16; begin += 32) score_columns<rows, 2>(q, begin);
    if (begin < end) score_columns<rows, 1>(q, begin);
  }

  // Of 16 * columns tokens from t on.
  template <int64_t rows, int64_t columns>
  void score_columns(int64_t q, int64_t t) const {
    __m512i sum[2 * rows][columns];
    SAGE_UNROLL for (int64_t r = 0; r < 2 * rows; ++r) {
      SAGE_UNROLL for (int64_t c = 0; c < columns; ++c) sum[r][c] = _mm512_setzero_si512();
    }
    for (int64_t d = 0; d < head_dim_; d += 4) {
      __m512i key[columns];
      SAGE_UNROLL for (int64_t c = 0; c < columns; ++c) key[c] = _mm512_loadu_si512(keys_ + (d * kTileTokens / 4 + t + c * 16) * 4);
      SAGE_UNROLL for (int64_t r = 0; r < 2 * rows; ++r) {
        const __m512i query = four_bytes(queries_ + (q * 2 + r) * padded_ + d);
        SAGE_UNROLL for (int64_t c = 0; c < columns; ++c) sum[r][c] = add_products(sum[r][c], key[c], query);
      }
    }
    SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
      const __m512i excess = _mm512_set1_epi32(query_excess_[q + r]);
      SAGE_UNROLL for (int64_t c = 0; c < columns; ++c) {
        const __m512i dots = _mm512_sub_epi32(joined(sum[2 * r][c], sum[2 * r + 1][c]), excess);
        _mm512_storeu_si512(dots_ + (q + r) * kTileTokens + t + c * 16, dots);
      }
    }
  }

  static __m512i four_bytes(const unsigned char* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }

  // Of four tokens, 64 dimensions: the four dimensions 16 i + 4 k of each token are the i-th 128 bits of vector k.
  template <int64_t parts>
  void interleave(const unsigned char* rows, int64_t d, __m512i (&to)[4], const unsigned char* ahead) const {
    const int64_t row_bytes = parts > 0 ? parts * 64 : head_dim_;
    __m512i x[4];
    SAGE_UNROLL for (int64_t i = 0; i < 4; ++i) {
      x[i] = load_bytes<parts>(rows + i * row_bytes, d);
      prefetch_far(ahead + i * row_bytes + d);
    }
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
    const __m512i c = _mm512_unpackhi_epi8(x[0], x[1]), e = _mm512_unpackhi_epi8(x[2], x[3]);
    to[0] = _mm512_unpacklo_epi16(a, b);
    to[1] = _mm512_unpackhi_epi16(a, b);
    to[2] = _mm512_unpacklo_epi16(c, e);
    to[3] = _mm512_unpackhi_epi16(c, e);
  }

  // values (four tokens, 64 dimensions, vector)
  void pack_values(const Piece& piece) const {
    for (int64_t t = piece.begin; t < piece.end; t += 4) {
      const int64_t at = (t - piece.begin) * head_dim_;
      for (int64_t d = 0; d < head_dim_; d += 64) {
        __m512i x[4];
        interleave<0>(piece.rows + at, d, x, piece.ahead + at);
        SAGE_UNROLL for (int64_t c = 0; c < 4; ++c) _mm512_storeu_si512(values_ + t * padded_ + d * 4 + c * 64, x[c]);
      }
    }
  }

  // Adds weights . values of a piece to the sums of the tile; those of its last piece to the accumulator.
  template <int64_t rows, int64_t parts, bool is_packed>
  void accumulate(const Queries& queries, int64_t q, const KVTile& tile, const Piece& piece, int64_t last_seen) const {
    const bool is_first = piece.begin <= tile.begin, is_last = piece.end >= tile.end;
    for (int64_t d = 0; d < head_dim_; d += 64) {
      __m512i sum[2 * rows][4];
      SAGE_UNROLL for (int64_t r = 0; r < 2 * rows; ++r) {
        SAGE_UNROLL for (int64_t c = 0; c < 4; ++c) sum[r][c] = _mm512_setzero_si512();
      }
      for (int64_t t = piece.begin; t < std::min(piece.end, last_seen); t += 4) {
        // Where `store_weights` leaves the four tokens.
        const unsigned char* weight = weights_ + q * kTileTokens + (t & 15) * 4 + (t >> 4) * 4;
        __m512i x[4];
        if constexpr (is_packed) {
          SAGE_UNROLL for (int64_t c = 0; c < 4; ++c) x[c] = _mm512_loadu_si512(values_ + t * padded_ + d * 4 + c * 64);
        } else {
          const int64_t at = (t - piece.begin) * (parts > 0 ? parts * 64 : head_dim_);
          interleave<parts>(piece.rows + at, d, x, piece.ahead + at);
        }
        SAGE_UNROLL for (int64_t r = 0; r < 2 * rows; ++r) {
          const __m512i w = four_bytes(weight + (r / 2 + r % 2 * kMaxQueries) * kTileTokens);
          SAGE_UNROLL for (int64_t c = 0; c < 4; ++c) sum[r][c] = add_products(sum[r][c], w, x[c]);
        }
      }
      SAGE_UNROLL for (int64_t r = 0; r < rows; ++r) {
        int32_t* sums = sums_ + (q + r) * padded_ + d;
        __m512i x[4];
        SAGE_UNROLL for (int64_t c = 0; c < 4; ++c) {
          x[c] = joined(sum[2 * r][c], sum[2 * r + 1][c]);
          if (!is_first) x[c] = _mm512_add_epi32(x[c], _mm512_loadu_si512(sums + c * 16));
          if (!is_last) _mm512_storeu_si512(sums + c * 16, x[c]);
        }
        if (is_last) add_sums(x, weight_units_[q + r], std::min<int64_t>(64, head_dim_ - d), queries.softmax.acc + (q + r) * head_dim_ + d);
      }
    }
  }

  // acc += sums * unit, for 64 dimensions in the order of `pack_values`, or the first of them.
  static void add_sums(const __m512i (&x)[4], float unit, int64_t count, float* acc) {
    const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), e = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    const __m512i sorted[4] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd),
                               _mm512_shuffle_i32x4(b, e, 0x88), _mm512_shuffle_i32x4(b, e, 0xdd)};
    for (int64_t i = 0; i < 4 && i * 16 < count; ++i) {
      store(acc + i * 16, fma(_mm512_cvtepi32_ps(sorted[i]), all(unit), load(acc + i * 16)));
    }
  }

  const KV& kv_;
  int64_t padded_;
  unsigned char* queries_;
  int32_t* query_excess_;  // what 128 more in each byte of a key adds to its product
  float* weight_units_;
  int32_t* dots_;
  unsigned char* weights_;  // (part, query, token)
  int32_t* sums_;
  unsigned char *keys_, *values_, *copies_;
};

}  // namespace sage::attention_detail
