// Float vectors of the widest kind that the build has, and what attention does with them.
#pragma once
// g++ 12 warns of its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>

#include "attention.h"

namespace sage::attention_detail {

#if defined(__AVX512F__)

using Vec = __m512;
using Mask = __mmask16;
constexpr int64_t kLanes = 16;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec magnitude(Vec x) { return _mm512_abs_ps(x); }
inline Vec with_sign_of(Vec x, Vec sign) {
  const __m512i top = _mm512_set1_epi32(INT32_MIN);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(top, _mm512_castps_si512(sign), _mm512_castps_si512(x), 0xca));
}
inline Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Vec pick(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Vec lane_numbers() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float maximum(Vec x) { return _mm512_reduce_max_ps(x); }

// The sums of four vectors.
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vec even = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
  const Vec odd = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
  const Vec abcd = add(even, odd);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <KVKind kind>
inline Vec load_as_float(const unsigned char* row, int64_t element) {
  if constexpr (kind == KVKind::f32) {
    return _mm512_loadu_ps(row + element * 4);
  } else if constexpr (kind == KVKind::bf16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + element * 2));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  } else if constexpr (kind == KVKind::f16) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + element * 2)));
  } else {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + element));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
  }
}

#else

using Vec = __m256;
using Mask = __m256;
constexpr int64_t kLanes = 8;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec magnitude(Vec x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Vec with_sign_of(Vec x, Vec sign) { return _mm256_blendv_ps(x, _mm256_or_ps(x, all(-0.0f)), sign); }
inline Vec times_power_of_two(Vec x, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
inline Vec pick(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
inline Vec lane_numbers() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
inline float sum(Vec x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float maximum(Vec x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// The sums of four vectors.
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

template <KVKind kind>
inline Vec load_as_float(const unsigned char* row, int64_t element) {
  if constexpr (kind == KVKind::f32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(row + element * 4));
  } else if constexpr (kind == KVKind::bf16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + element * 2));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  } else if constexpr (kind == KVKind::f16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + element * 2)));
  } else {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + element));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
  }
}

#endif

// 2^x, within 2 ulp, for x <= 0; exactly 1 at 0. What is below 2^-126 comes out as about 2^-126: attention
// multiplies it by a sum that is 0, or adds it to one that is at least 1.
inline Vec exp2(Vec x) {
  x = max(x, all(-126.0f));
  const Vec n = round(x), f = sub(x, n);
  Vec p = all(1.535336e-4f);
  p = fma(p, f, all(1.3398875e-3f));
  p = fma(p, f, all(9.618437e-3f));
  p = fma(p, f, all(5.5503324e-2f));
  p = fma(p, f, all(0.24022648f));
  p = fma(p, f, all(0.6931472f));
  return times_power_of_two(fma(p, f, all(1.0f)), n);
}

// tanh(x), within a few ulp also near 0: an odd polynomial (Cephes) there, by 2^x elsewhere.
inline Vec tanh(Vec x) {
  const Vec size = magnitude(x), square = mul(x, x);
  Vec p = all(-5.70498872745e-3f);
  p = fma(p, square, all(2.06390887954e-2f));
  p = fma(p, square, all(-5.37397155531e-2f));
  p = fma(p, square, all(1.33314422036e-1f));
  p = fma(p, square, all(-3.33332819422e-1f));
  const Vec near = fma(mul(p, square), x, x);
  const Vec decay = exp2(mul(size, all(-2.885390082f)));  // e^(-2 |x|)
  const Vec far = div(sub(all(1.0f), decay), add(all(1.0f), decay));
  return pick(less(size, all(0.625f)), near, with_sign_of(far, x));
}

inline float exp2(float x) { return _mm_cvtss_f32(
#if defined(__AVX512F__)
    _mm512_castps512_ps128(exp2(all(x)))
#else
    _mm256_castps256_ps128(exp2(all(x)))
#endif
  ); }

}  // namespace sage::attention_detail
