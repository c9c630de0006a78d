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
