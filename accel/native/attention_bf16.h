// Attention by AVX-512's products of bf16 pairs, with float32 sums, over bf16 KV.
#pragma once
#include "attention_heads.h"

namespace sage::attention_detail {

// Interleaves the values of two tokens: (dimension, 2).
inline void pack_pair(const unsigned char* even, const unsigned char* odd, int64_t head_dim, uint32_t* to, const unsigned char* ahead) {
  alignas(64) static constexpr uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first_half = _mm512_load_si512(order), second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
  int64_t d = 0;
  for (; d + 32 <= head_dim; d += 32) {
    const __m512i a = _mm512_loadu_si512(even + d * 2), b = _mm512_loadu_si512(odd + d * 2);
    _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, first_half, b));
    _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, second_half, b));
    prefetch_far(ahead + d * 4);
    prefetch_far(ahead + d * 4 + 64);
  }
  if (d == head_dim) return;
  const __m512i a = _mm512_maskz_loadu_epi16(0xffff, even + d * 2), b = _mm512_maskz_loadu_epi16(0xffff, odd + d * 2);
  _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, first_half, b));
}

class Bf16Kernel {
 public:
  static int64_t scratch_bytes(int64_t head_dim) {
    return kMaxQueries * round_up(head_dim, 32) * 2 + kTileTokens * head_dim * 2 + kMaxQueries * kTileTokens * 4;
  }

  Bf16Kernel(const KV& kv, const Scoring& scoring, int64_t head_dim, unsigned char* scratch)
      : kv_(kv), scoring_(scoring), head_dim_(head_dim), padded_(round_up(head_dim, 32)), queries_(scratch) {
    values_ = reinterpret_cast<uint32_t*>(queries_ + kMaxQueries * padded_ * 2);
    scores_ = reinterpret_cast<float*>(values_ + kTileTokens / 2 * head_dim);
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
    Pieces pieces(kv_, queries, tile, following);
    pieces.for_keys([&](int64_t head, int64_t begin, int64_t end, const unsigned char* ahead) {
      for_few<4>(queries.count, [&](auto rows, int64_t i) {
        score<rows>(queries, head, i, tile, begin, end, i == 0 ? ahead : tile.key[tile.begin]);
      });
    });
    for (int64_t head = 0; head < queries.num_heads; ++head) {
      for_few<4>(queries.count, [&](auto rows, int64_t i) { weigh<rows>(queries, head, i, tile); });
    }
    pieces.for_values([&](int64_t head, int64_t begin, int64_t end, const unsigned char* ahead) {
      for (int64_t t = begin; t < end; t += 2) {
        pack_pair(tile.value[t], tile.value[t + 1], head_dim_, values_ + t / 2 * head_dim_, ahead + (t - begin) * head_dim_ * 2);
      }
      for_few<4>(queries.count, [&](auto rows, int64_t i) { accumulate<rows>(queries, head, i, tile, begin, end); });
    });
  }

 private:
  // The intrinsic makes g++ 12 spill its sums.
  static Vec add_products(Vec sum, __m512i a, __m512i b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }

  template <int64_t rows>
  void weigh(const Queries& queries, int64_t head, int64_t i, const KVTile& tile) const {
    const Seen<rows> seen(queries, i, tile, 0, kTileTokens);
    if (!seen.any()) return;
    const Softmax& softmax = queries.softmax;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t q = head * queries.stride + i + r;
      float* row = scores_ + q * kTileTokens;
      softmax_row(scoring_, row, seen.low[r], seen.high[r], nullptr, softmax.m[q], softmax.l[q], softmax.acc + q * head_dim_,
                  head_dim_);
      round_weights(row);
    }
  }

  // 64 weights become 32 pairs of bf16, in the same place.
  static void round_weights(float* row) {
    for (int64_t t = 0; t < kTileTokens; t += 32) {
      const __m512i pairs = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load(row + t + 16), load(row + t)));
      _mm512_storeu_si512(row + t / 2, pairs);
    }
  }

  template <int64_t rows>
  void score(const Queries& queries, int64_t head, int64_t i, const KVTile& tile, int64_t begin, int64_t end,
             const unsigned char* ahead) const {
    const Seen<rows> seen(queries, i, tile, begin, end);
    const int64_t first_query = head * queries.stride + i;
    const unsigned char* query = queries_ + first_query * padded_ * 2;
    for (int64_t t = seen.from; t < seen.to; t += 4) {
      Vec sum[rows][4];
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t k = 0; k < 4; ++k) sum[r][k] = zero();
      }
      for (int64_t d = 0; d < head_dim_; d += 32) {
        const __mmask32 in_head = d + 32 <= head_dim_ ? 0xffffffff : 0xffff;
        __m512i q[rows];
        for (int64_t r = 0; r < rows; ++r) q[r] = _mm512_loadu_si512(query + (r * padded_ + d) * 2);
        for (int64_t k = 0; k < 4; ++k) {
          const __m512i key = _mm512_maskz_loadu_epi16(in_head, tile.key[t + k] + d * 2);
          prefetch_far(ahead + ((t + k - begin) * head_dim_ + d) * 2);
          for (int64_t r = 0; r < rows; ++r) sum[r][k] = add_products(sum[r][k], q[r], key);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        _mm_storeu_ps(scores_ + (first_query + r) * kTileTokens + t, sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
      }
    }
  }

  // acc[row] += sum over pairs of tokens of weights[row][pair] . values[pair], 16 sums in registers at a time.
  template <int64_t rows>
  void accumulate(const Queries& queries, int64_t head, int64_t i, const KVTile& tile, int64_t begin, int64_t end) const {
    const Seen<rows> seen(queries, i, tile, begin, end);
    if (!seen.any()) return;
    const int64_t q = head * queries.stride + i;
    const float* weights = scores_ + q * kTileTokens;
    float* acc = queries.softmax.acc + q * head_dim_;
    constexpr int64_t columns = rows == 1 ? 8 : 16 / rows;
    int64_t d = 0;
    for (; d + 16 * columns <= head_dim_; d += 16 * columns) accumulate_at<rows, columns>(weights, seen.from, seen.to, acc, d);
    for (; d < head_dim_; d += 16) accumulate_at<rows, 1>(weights, seen.from, seen.to, acc, d);
  }

  template <int64_t rows, int64_t columns>
  void accumulate_at(const float* weights, int64_t from, int64_t to, float* acc, int64_t d) const {
    Vec sum[rows][columns];
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) sum[r][c] = load(acc + r * head_dim_ + d + c * 16);
    }
    for (int64_t pair = from / 2; pair < (to + 1) / 2; ++pair) {
      __m512i value[columns];
      for (int64_t c = 0; c < columns; ++c) value[c] = _mm512_loadu_si512(values_ + pair * head_dim_ + d + c * 16);
      for (int64_t r = 0; r < rows; ++r) {
        const __m512i weight = _mm512_castps_si512(all(weights[r * kTileTokens + pair]));
        for (int64_t c = 0; c < columns; ++c) sum[r][c] = add_products(sum[r][c], value[c], weight);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) store(acc + r * head_dim_ + d + c * 16, sum[r][c]);
    }
  }

  const KV& kv_;
  Scoring scoring_;
  int64_t head_dim_, padded_;
  unsigned char* queries_;
  uint32_t* values_;
  float* scores_;
};

}  // namespace sage::attention_detail
