// The widest float vector of the build, under one set of names.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace sage {

inline void prefetch(const void* x) { _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T0); }
inline void prefetch_far(const void* x) { _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T1); }  // into level 2

#if defined(__AVX512F__)

using Lanes = __m512;
using IntLanes = __m512i;
constexpr int64_t kLanes = 16;

inline __mmask16 first_lanes(int64_t count) { return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }
inline Lanes zero_lanes() { return _mm512_setzero_ps(); }
inline Lanes same_lanes(float x) { return _mm512_set1_ps(x); }
inline Lanes load_lanes(const float* x) { return _mm512_loadu_ps(x); }
// The first `count` lanes from memory, the others 0.
inline Lanes load_lanes(const float* x, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), x); }
inline void store_lanes(float* x, Lanes v) { _mm512_storeu_ps(x, v); }
inline void store_lanes(float* x, Lanes v, int64_t count) { _mm512_mask_storeu_ps(x, first_lanes(count), v); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes multiply(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
// 1 / x within 1e-7 of its size, in a third of a division's time; x is positive.
inline Lanes reciprocal(Lanes x) {
  const Lanes near = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(near, _mm512_fnmadd_ps(x, near, _mm512_set1_ps(2.0f)));
}
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
// min and max hand on a NaN in `x`.
inline Lanes clamp(Lanes x, float low, float high) {
  return _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), x));
}
inline Lanes round_lanes(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes power_of_two(Lanes whole) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), whole); }
inline Lanes times_power_of_two(Lanes x, Lanes whole) { return _mm512_scalef_ps(x, whole); }
inline Lanes to_float(IntLanes x) { return _mm512_cvtepi32_ps(x); }
inline IntLanes to_int(Lanes x) { return _mm512_cvtps_epi32(x); }
inline IntLanes load_ints(const int32_t* x) { return _mm512_loadu_si512(x); }
inline int32_t sum(IntLanes x) { return _mm512_reduce_add_epi32(x); }
inline IntLanes add(IntLanes a, IntLanes b) { return _mm512_add_epi32(a, b); }
inline IntLanes zero_ints() { return _mm512_setzero_si512(); }
inline IntLanes magnitude_bits(Lanes x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }
inline IntLanes larger(IntLanes a, IntLanes b) { return _mm512_max_epi32(a, b); }
inline int32_t largest(IntLanes x) { return _mm512_reduce_max_epi32(x); }
inline void store_bytes(int8_t* x, IntLanes v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(x), _mm512_cvtsepi32_epi8(v)); }

inline Lanes subtract(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes divide(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline float largest(Lanes x) { return _mm512_reduce_max_ps(x); }

using LaneMask = __mmask16;
inline LaneMask at_least(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline LaneMask above(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline LaneMask is_nan(Lanes x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline LaneMask no_lanes() { return 0; }
inline LaneMask either(LaneMask a, LaneMask b) { return a | b; }
inline LaneMask both(LaneMask a, LaneMask b) { return a & b; }
inline LaneMask without(LaneMask a, LaneMask b) { return a & ~b; }
inline bool any(LaneMask m) { return m != 0; }
inline uint32_t bits(LaneMask m) { return m; }
inline int64_t count(LaneMask m) { return __builtin_popcount(m); }
inline Lanes only(LaneMask m, Lanes x) { return _mm512_maskz_mov_ps(m, x); }
inline Lanes add_where(LaneMask m, Lanes a, Lanes b) { return _mm512_mask_add_ps(a, m, a, b); }
// Writes the masked lanes one after another. Compressed in a register: some processors take long to do so in memory.
inline void store_masked(float* out, LaneMask m, Lanes x) { store_lanes(out, _mm512_maskz_compress_ps(m, x), count(m)); }
// Writes the numbers of the masked lanes, of which the first is `begin`, and anything up to a whole vector.
inline void store_places(int32_t* out, LaneMask m, int32_t begin) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(m, _mm512_add_epi32(lanes, _mm512_set1_epi32(begin))));
}

// A sum of lanes in float64.
class DoubleSum {
 public:
  void add(Lanes x) {
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low_, high_)); }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};

#else

using Lanes = __m256;
using IntLanes = __m256i;
constexpr int64_t kLanes = 8;

inline __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Lanes zero_lanes() { return _mm256_setzero_ps(); }
inline Lanes same_lanes(float x) { return _mm256_set1_ps(x); }
inline Lanes load_lanes(const float* x) { return _mm256_loadu_ps(x); }
// The first `count` lanes from memory, the others 0.
inline Lanes load_lanes(const float* x, int64_t count) { return _mm256_maskload_ps(x, first_lanes(count)); }
inline void store_lanes(float* x, Lanes v) { _mm256_storeu_ps(x, v); }
inline void store_lanes(float* x, Lanes v, int64_t count) { _mm256_maskstore_ps(x, first_lanes(count), v); }
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes multiply(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes reciprocal(Lanes x) { return _mm256_div_ps(_mm256_set1_ps(1.0f), x); }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
// min and max hand on a NaN in `x`.
inline Lanes clamp(Lanes x, float low, float high) {
  return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), x));
}
inline Lanes round_lanes(Lanes x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes power_of_two(Lanes whole) {  // whole in -126 ... 127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
inline Lanes times_power_of_two(Lanes x, Lanes whole) { return _mm256_mul_ps(x, power_of_two(whole)); }
inline Lanes to_float(IntLanes x) { return _mm256_cvtepi32_ps(x); }
inline IntLanes to_int(Lanes x) { return _mm256_cvtps_epi32(x); }
inline IntLanes load_ints(const int32_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
inline IntLanes add(IntLanes a, IntLanes b) { return _mm256_add_epi32(a, b); }
inline IntLanes zero_ints() { return _mm256_setzero_si256(); }
inline IntLanes magnitude_bits(Lanes x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }
inline IntLanes larger(IntLanes a, IntLanes b) { return _mm256_max_epi32(a, b); }
inline int32_t sum(IntLanes x) {
  alignas(32) int32_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
  int32_t total = 0;
  for (int32_t lane : lanes) total += lane;
  return total;
}
inline int32_t largest(IntLanes x) {
  alignas(32) int32_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
  int32_t most = lanes[0];
  for (int32_t lane : lanes) most = lane > most ? lane : most;
  return most;
}
inline void store_bytes(int8_t* x, IntLanes v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(x), _mm_packs_epi16(words, words));
}

inline Lanes subtract(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
inline Lanes divide(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline float largest(Lanes x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

using LaneMask = __m256;
inline LaneMask at_least(Lanes a, Lanes b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline LaneMask above(Lanes a, Lanes b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline LaneMask is_nan(Lanes x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
inline LaneMask no_lanes() { return _mm256_setzero_ps(); }
inline LaneMask either(LaneMask a, LaneMask b) { return _mm256_or_ps(a, b); }
inline LaneMask both(LaneMask a, LaneMask b) { return _mm256_and_ps(a, b); }
inline LaneMask without(LaneMask a, LaneMask b) { return _mm256_andnot_ps(b, a); }
inline bool any(LaneMask m) { return _mm256_movemask_ps(m) != 0; }
inline uint32_t bits(LaneMask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
inline int64_t count(LaneMask m) { return __builtin_popcount(bits(m)); }
inline Lanes only(LaneMask m, Lanes x) { return _mm256_and_ps(m, x); }
inline Lanes add_where(LaneMask m, Lanes a, Lanes b) { return _mm256_add_ps(a, _mm256_and_ps(m, b)); }
// Writes the masked lanes one after another.
inline void store_masked(float* out, LaneMask m, Lanes x) {
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, x);
  for (int bits = _mm256_movemask_ps(m); bits != 0; bits &= bits - 1) *out++ = lanes[__builtin_ctz(bits)];
}
// Writes the numbers of the masked lanes, of which the first is `begin`.
inline void store_places(int32_t* out, LaneMask m, int32_t begin) {
  for (int bits = _mm256_movemask_ps(m); bits != 0; bits &= bits - 1) *out++ = begin + __builtin_ctz(bits);
}

// A sum of lanes in float64.
class DoubleSum {
 public:
  void add(Lanes x) {
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
inline Lanes exponential(Lanes x) {
  x = clamp(x, -87.0f, 88.0f);
  const Lanes whole = round_lanes(multiply(x, same_lanes(1.44269504f)));
  Lanes rest = multiply_add(whole, same_lanes(-0.693145752f), x);
  rest = multiply_add(whole, same_lanes(-1.42860677e-6f), rest);
  Lanes p = same_lanes(1.0f / 720);
  p = multiply_add(p, rest, same_lanes(1.0f / 120));
  p = multiply_add(p, rest, same_lanes(1.0f / 24));
  p = multiply_add(p, rest, same_lanes(1.0f / 6));
  p = multiply_add(p, rest, same_lanes(0.5f));
  p = multiply_add(p, rest, same_lanes(1.0f));
  p = multiply_add(p, rest, same_lanes(1.0f));
  return multiply(p, power_of_two(whole));
}

inline Lanes silu(Lanes x) {
  return multiply(x, reciprocal(add(same_lanes(1.0f), exponential(multiply(x, same_lanes(-1.0f))))));
}

}  // namespace sage
