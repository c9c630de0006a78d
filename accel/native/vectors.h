// The widest float vector of the build, under one set of names, and functions of it.
#pragma once
// g++ 12 warns of its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>

// Before a loop whose number of turns is a constant: g++ otherwise keeps arrays of vectors in memory.
#define SAGE_UNROLL _Pragma("GCC unroll 16")

namespace sage {

inline void prefetch(const void* x) { _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T0); }
inline void prefetch_far(const void* x) { _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T1); }  // into level 2

#if defined(__AVX512F__)

using Vec = __m512;
using IntVec = __m512i;
constexpr int64_t kLanes = 16;

inline __mmask16 first_lanes(int64_t count) { return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* x) { return _mm512_loadu_ps(x); }
// The first `count` lanes from memory, the others 0.
inline Vec load(const float* x, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), x); }
inline void store(float* x, Vec v) { _mm512_storeu_ps(x, v); }
inline void store(float* x, Vec v, int64_t count) { _mm512_mask_storeu_ps(x, first_lanes(count), v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
// 1 / x within 1e-7 of its size, in a third of a division's time; x is positive.
inline Vec reciprocal(Vec x) {
  const Vec near = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(near, _mm512_fnmadd_ps(x, near, _mm512_set1_ps(2.0f)));
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// min and max hand on a NaN in `x`.
inline Vec clamp(Vec x, float low, float high) {
  return _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), x));
}
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec whole) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), whole); }
inline Vec times_power_of_two(Vec x, Vec whole) { return _mm512_scalef_ps(x, whole); }
inline Vec to_float(IntVec x) { return _mm512_cvtepi32_ps(x); }
inline IntVec to_int(Vec x) { return _mm512_cvtps_epi32(x); }
inline IntVec load_ints(const int32_t* x) { return _mm512_loadu_si512(x); }
inline int32_t sum(IntVec x) { return _mm512_reduce_add_epi32(x); }
inline IntVec add(IntVec a, IntVec b) { return _mm512_add_epi32(a, b); }
inline IntVec zero_ints() { return _mm512_setzero_si512(); }
inline IntVec all_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline IntVec sub(IntVec a, IntVec b) { return _mm512_sub_epi32(a, b); }
inline IntVec mul(IntVec a, IntVec b) { return _mm512_mullo_epi32(a, b); }
inline IntVec load_bytes(const void* x) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(x))); }
inline IntVec magnitude_bits(Vec x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }
inline IntVec max(IntVec a, IntVec b) { return _mm512_max_epi32(a, b); }
inline int32_t maximum(IntVec x) { return _mm512_reduce_max_epi32(x); }
inline void store_bytes(int8_t* x, IntVec v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(x), _mm512_cvtsepi32_epi8(v)); }

inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float maximum(Vec x) { return _mm512_reduce_max_ps(x); }

inline Vec magnitude(Vec x) { return _mm512_abs_ps(x); }
inline Vec with_sign_of(Vec x, Vec sign) {
  const __m512i top = _mm512_set1_epi32(INT32_MIN);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(top, _mm512_castps_si512(sign), _mm512_castps_si512(x), 0xca));
}
inline float first_lane(Vec x) { return _mm512_cvtss_f32(x); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
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

// A vector's worth of values in other types, widened exactly.
inline Vec load_bf16(const void* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(x))), 16));
}
inline Vec load_f16(const void* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(x))); }
inline Vec load_int8(const void* x) { return to_float(load_bytes(x)); }
// E4M3, but for NaN: the bits of sign, exponent and mantissa, and what float32 adds to the exponent.
inline Vec load_fp8(const void* x) {
  const __m512i bits = _mm512_and_si512(_mm512_slli_epi32(load_bytes(x), 20), _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
  return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
}

using Mask = __mmask16;
inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Vec pick(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Vec lane_numbers() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Mask at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask is_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Mask no_lanes() { return 0; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask without(Mask a, Mask b) { return a & ~b; }
inline bool any(Mask m) { return m != 0; }
inline uint32_t bits(Mask m) { return m; }
inline Mask lanes_of(uint32_t bits) { return static_cast<Mask>(bits); }
inline int64_t count(Mask m) { return __builtin_popcount(m); }
inline Vec only(Mask m, Vec x) { return _mm512_maskz_mov_ps(m, x); }
inline Vec add_where(Mask m, Vec a, Vec b) { return _mm512_mask_add_ps(a, m, a, b); }
// Writes the masked lanes one after another. Compressed in a register: some processors take long to do so in memory.
inline void store_masked(float* out, Mask m, Vec x) { store(out, _mm512_maskz_compress_ps(m, x), count(m)); }
// Writes the numbers of the masked lanes, of which the first is `begin`, and anything up to a whole vector.
inline void store_places(int32_t* out, Mask m, int32_t begin) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(m, _mm512_add_epi32(lanes, _mm512_set1_epi32(begin))));
}

// A sum of lanes in float64.
class DoubleSum {
 public:
  void add(Vec x) {
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low_, high_)); }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};

#else

using Vec = __m256;
using IntVec = __m256i;
constexpr int64_t kLanes = 8;

inline __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* x) { return _mm256_loadu_ps(x); }
// The first `count` lanes from memory, the others 0.
inline Vec load(const float* x, int64_t count) { return _mm256_maskload_ps(x, first_lanes(count)); }
inline void store(float* x, Vec v) { _mm256_storeu_ps(x, v); }
inline void store(float* x, Vec v, int64_t count) { _mm256_maskstore_ps(x, first_lanes(count), v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec reciprocal(Vec x) { return _mm256_div_ps(_mm256_set1_ps(1.0f), x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// min and max hand on a NaN in `x`.
inline Vec clamp(Vec x, float low, float high) {
  return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), x));
}
inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec whole) {  // whole in -126 ... 127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
inline Vec times_power_of_two(Vec x, Vec whole) { return _mm256_mul_ps(x, power_of_two(whole)); }
inline Vec to_float(IntVec x) { return _mm256_cvtepi32_ps(x); }
inline IntVec to_int(Vec x) { return _mm256_cvtps_epi32(x); }
inline IntVec load_ints(const int32_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
inline IntVec add(IntVec a, IntVec b) { return _mm256_add_epi32(a, b); }
inline IntVec zero_ints() { return _mm256_setzero_si256(); }
inline IntVec all_ints(int32_t x) { return _mm256_set1_epi32(x); }
inline IntVec sub(IntVec a, IntVec b) { return _mm256_sub_epi32(a, b); }
inline IntVec mul(IntVec a, IntVec b) { return _mm256_mullo_epi32(a, b); }
inline IntVec load_bytes(const void* x) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(x))); }
inline IntVec magnitude_bits(Vec x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }
inline IntVec max(IntVec a, IntVec b) { return _mm256_max_epi32(a, b); }
inline int32_t sum(IntVec x) {
  alignas(32) int32_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
  int32_t total = 0;
  for (int32_t lane : lanes) total += lane;
  return total;
}
inline int32_t maximum(IntVec x) {
  alignas(32) int32_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
  int32_t most = lanes[0];
  for (int32_t lane : lanes) most = lane > most ? lane : most;
  return most;
}
inline void store_bytes(int8_t* x, IntVec v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(x), _mm_packs_epi16(words, words));
}

inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float maximum(Vec x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Vec magnitude(Vec x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Vec with_sign_of(Vec x, Vec sign) { return _mm256_blendv_ps(x, _mm256_or_ps(x, all(-0.0f)), sign); }
inline float first_lane(Vec x) { return _mm256_cvtss_f32(x); }
inline float sum(Vec x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// The sums of four vectors.
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

// A vector's worth of values in other types, widened exactly.
inline Vec load_bf16(const void* x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(x))), 16));
}
inline Vec load_f16(const void* x) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(x))); }
inline Vec load_int8(const void* x) { return to_float(load_bytes(x)); }
inline Vec load_fp8(const void* x) {
  const __m256i bits = _mm256_and_si256(_mm256_slli_epi32(load_bytes(x), 20), _mm256_set1_epi32(static_cast<int>(0x87f00000u)));
  return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}

using Mask = __m256;
inline Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Vec pick(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
inline Vec lane_numbers() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
inline Mask at_least(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline Mask above(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Mask is_nan(Vec x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
inline Mask no_lanes() { return _mm256_setzero_ps(); }
inline Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
inline Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
inline Mask without(Mask a, Mask b) { return _mm256_andnot_ps(b, a); }
inline bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
inline uint32_t bits(Mask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
inline Mask lanes_of(uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, each));
}
inline int64_t count(Mask m) { return __builtin_popcount(bits(m)); }
inline Vec only(Mask m, Vec x) { return _mm256_and_ps(m, x); }
inline Vec add_where(Mask m, Vec a, Vec b) { return _mm256_add_ps(a, _mm256_and_ps(m, b)); }
// Writes the masked lanes one after another.
inline void store_masked(float* out, Mask m, Vec x) {
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, x);
  for (int bits = _mm256_movemask_ps(m); bits != 0; bits &= bits - 1) *out++ = lanes[__builtin_ctz(bits)];
}
// Writes the numbers of the masked lanes, of which the first is `begin`.
inline void store_places(int32_t* out, Mask m, int32_t begin) {
  for (int bits = _mm256_movemask_ps(m); bits != 0; bits &= bits - 1) *out++ = begin + __builtin_ctz(bits);
}

// A sum of lanes in float64.
class DoubleSum {
 public:
  void add(Vec x) {
    low_ = _mm256_add_pd(low_, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    high_ = _mm256_add_pd(high_, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  double total() const {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, _mm256_add_pd(low_, high_));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }

 private:
  __m256d low_ = _mm256_setzero_pd(), high_ = _mm256_setzero_pd();
};

#endif

// e to the x within 3e-7 of its size, with x cut to -87 ... 88: ln 2 taken off in two parts, then a Taylor polynomial.
inline Vec exponential(Vec x) {
  x = clamp(x, -87.0f, 88.0f);
  const Vec whole = round(mul(x, all(1.44269504f)));
  Vec rest = fma(whole, all(-0.693145752f), x);
  rest = fma(whole, all(-1.42860677e-6f), rest);
  Vec p = all(1.0f / 720);
  p = fma(p, rest, all(1.0f / 120));
  p = fma(p, rest, all(1.0f / 24));
  p = fma(p, rest, all(1.0f / 6));
  p = fma(p, rest, all(0.5f));
  p = fma(p, rest, all(1.0f));
  p = fma(p, rest, all(1.0f));
  return mul(p, power_of_two(whole));
}

inline Vec silu(Vec x) {
  return mul(x, reciprocal(add(all(1.0f), exponential(mul(x, all(-1.0f))))));
}

// 2^x, within 2 ulp, for x <= 0; exactly 1 at 0. What is below 2^-126 comes out as about 2^-126: attention
// multiplies it by a sum that is 0, or adds it to one that is at least 1.
inline Vec exp2(Vec x) {
  x = max(all(-126.0f), x);  // in this order it hands on NaN
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

inline float exp2(float x) { return first_lane(exp2(all(x))); }

}  // namespace sage
