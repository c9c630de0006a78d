// Products with AVX2 and FMA: 6 rows (floats) or 4 rows (integers) by one panel of 16 outputs.
//
// bf16 weights are widened by a shift and a mask. int8: |w| is the unsigned operand of maddubs and sign(x, w) the signed
// one, which is exact for 8-bit activations (2 * 128 * 127 fits 16 bits). int4: the nibbles are the unsigned operand.
#pragma once
#include "linear_epilogue.h"

namespace sage::linear {

#define SAGE_INLINE inline __attribute__((always_inline))

template <int rows, int panels>
struct Sums {
  alignas(32) float left[panels][rows * kLanes];
  alignas(32) float right[panels][rows * kLanes];
};

SAGE_INLINE __m256i load_quads(const unsigned char* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }
SAGE_INLINE __m256i same_quads(const unsigned char* at) {
  return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(at)));
}

template <int rows, int panels>
void finish_panels(const Product& p, int64_t panel, int64_t row_group, const Sums<rows, panels>& sums) {
  for (int i = 0; i < panels; ++i) {
    finish(p, panel + i, p.first_row(row_group), p.num_rows(row_group), sums.left[i], sums.right[i]);
  }
}

// Even and odd inputs of a line of bf16 pairs as floats.
SAGE_INLINE __m256 even_inputs(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
SAGE_INLINE __m256 odd_inputs(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// With few rows two panels are walked at once, so that enough sums are in flight: each keeps its order.
template <WeightKind kind, int rows, int panels>
__attribute__((noinline)) static void rows_float(const Product& p, int64_t panel, int64_t row_group) {
  const unsigned char* weights = p.panel(panel);
  const unsigned char* activations = p.rows_at(row_group);
  __m256 left[panels][rows], right[panels][rows];
  for (int i = 0; i < panels; ++i) {
    for (int row = 0; row < rows; ++row) left[i][row] = right[i][row] = _mm256_setzero_ps();
  }
  auto add_line = [&](int i, __m256 w0, __m256 w1, int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int row = 0; row < rows; ++row) {
      const __m256 x = _mm256_broadcast_ss(reinterpret_cast<const float*>(activations + row * 64) + k);
      left[i][row] = _mm256_fmadd_ps(w0, x, left[i][row]);
      right[i][row] = _mm256_fmadd_ps(w1, x, right[i][row]);
    }
  };
  for (int64_t step = 0; step < p.input.depth.num_steps(); ++step, activations += p.input.height * 64) {
    constexpr int per_line = kind == WeightKind::bf16 ? 2 : 1;
    for (int64_t k = 0; k < 16; k += per_line, weights += kLineBytes) {
#pragma GCC unroll 2
      for (int i = 0; i < panels; ++i) {
        const unsigned char* line = weights + i * p.panels.panel_bytes;
        const __m256i w0 = load_quads(line), w1 = load_quads(line + kHalfBytes);
        if constexpr (kind == WeightKind::bf16) {
          add_line(i, even_inputs(w0), even_inputs(w1), k);
          add_line(i, odd_inputs(w0), odd_inputs(w1), k + 1);
        } else {
          add_line(i, _mm256_castsi256_ps(w0), _mm256_castsi256_ps(w1), k);
        }
      }
    }
  }
  Sums<rows, panels> sums;
  for (int i = 0; i < panels; ++i) {
    for (int row = 0; row < rows; ++row) {
      store_lanes(sums.left[i] + row * kLanes, left[i][row]);
      store_lanes(sums.right[i] + row * kLanes, right[i][row]);
    }
  }
  finish_panels(p, panel, row_group, sums);
}

SAGE_INLINE void dot_int8(__m256i& sum, __m256i w, __m256i size, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w));
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <int rows>
__attribute__((noinline)) static void rows_int8(const Product& p, int64_t panel, int64_t row_group) {
  const unsigned char* weights = p.panel(panel);
  const auto* scales = reinterpret_cast<const float*>(weights + p.panels.scales_at);
  const unsigned char* activations = p.rows_at(row_group);
  __m256i left[rows], right[rows];
  for (int row = 0; row < rows; ++row) left[row] = right[row] = _mm256_setzero_si256();
  for (int64_t step = 0; step < p.input.depth.num_steps(); ++step, activations += p.input.height * 64) {
    for (int64_t k = 0; k < 64; k += 4, weights += kLineBytes) {
      const __m256i w0 = load_quads(weights), w1 = load_quads(weights + kHalfBytes);
      const __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) {
        const __m256i x = same_quads(activations + row * 64 + k);
        dot_int8(left[row], w0, size0, x);
        dot_int8(right[row], w1, size1, x);
      }
    }
  }
  const Lanes left_scale = load_lanes(scales), right_scale = load_lanes(scales + kLanes);
  Sums<rows, 1> sums;
  const int64_t first = p.first_row(row_group), count = p.num_rows(row_group);
  for (int64_t row = 0; row < rows; ++row) {
    const Lanes scale = same_lanes(row < count ? p.scales[first + row] : 0.0f);
    store_lanes(sums.left[0] + row * kLanes, multiply(multiply(scale, left_scale), to_float(left[row])));
    store_lanes(sums.right[0] + row * kLanes, multiply(multiply(scale, right_scale), to_float(right[row])));
  }
  finish_panels(p, panel, row_group, sums);
}

// Four products of a nibble and a byte, added pairwise in 16 bits, fit: 4 * 2 * 15 * 127.
template <int rows>
__attribute__((noinline)) static void rows_int4(const Product& p, int64_t panel, int64_t row_group) {
  const Depth& depth = p.input.depth;
  const int64_t first = p.first_row(row_group), count = p.num_rows(row_group), height = p.input.height;
  const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const unsigned char* activations = p.rows_at(row_group);
  Sums<rows, 1> sums;
  for (int row = 0; row < rows; ++row) {
    store_lanes(sums.left[0] + row * kLanes, zero_lanes());
    store_lanes(sums.right[0] + row * kLanes, zero_lanes());
  }
  for (int64_t group = 0; group < depth.num_groups; ++group) {
    const unsigned char* weights = p.panel(panel) + group * p.panels.group_bytes;
    const auto* scales = reinterpret_cast<const float*>(weights + p.panels.scales_at);
    __m256i left[rows], right[rows];
    for (int row = 0; row < rows; ++row) {
      const int32_t start = row < count ? -8 * p.sums[(first + row) * depth.num_groups + group] : 0;
      left[row] = right[row] = _mm256_set1_epi32(start);
    }
    for (int64_t step = 0; step < depth.steps_per_group; ++step, activations += height * depth.step_bytes) {
      for (int64_t k = 0; k < depth.step_bytes; k += 8, weights += kLineBytes) {
        const __m256i w0 = load_quads(weights), w1 = load_quads(weights + kHalfBytes);
        const __m256i low0 = _mm256_and_si256(w0, low_bits), low1 = _mm256_and_si256(w1, low_bits);
        const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), low_bits);
        const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(w1, 4), low_bits);
#pragma GCC unroll 4
        for (int row = 0; row < rows; ++row) {
          const unsigned char* quad = activations + row * depth.step_bytes + k;
          const __m256i x0 = same_quads(quad), x1 = same_quads(quad + 4);
          const __m256i pairs0 = _mm256_add_epi16(_mm256_maddubs_epi16(low0, x0), _mm256_maddubs_epi16(high0, x1));
          const __m256i pairs1 = _mm256_add_epi16(_mm256_maddubs_epi16(low1, x0), _mm256_maddubs_epi16(high1, x1));
          left[row] = _mm256_add_epi32(left[row], _mm256_madd_epi16(pairs0, ones));
          right[row] = _mm256_add_epi32(right[row], _mm256_madd_epi16(pairs1, ones));
        }
      }
    }
    const Lanes left_scale = load_lanes(scales), right_scale = load_lanes(scales + kLanes);
    for (int row = 0; row < rows; ++row) {
      const Lanes scale = same_lanes(row < count ? p.scales[(first + row) * depth.num_groups + group] : 0.0f);
      float *to_left = sums.left[0] + row * kLanes, *to_right = sums.right[0] + row * kLanes;
      store_lanes(to_left, multiply_add(multiply(scale, left_scale), to_float(left[row]), load_lanes(to_left)));
      store_lanes(to_right, multiply_add(multiply(scale, right_scale), to_float(right[row]), load_lanes(to_right)));
    }
  }
  finish_panels(p, panel, row_group, sums);
}

using RowsKernel = void (*)(const Product&, int64_t panel, int64_t row_group);

template <int rows, int panels>
RowsKernel float_kernel(WeightKind kind) {
  return kind == WeightKind::bf16 ? rows_float<WeightKind::bf16, rows, panels> : rows_float<WeightKind::f32, rows, panels>;
}

template <int rows>
RowsKernel integer_kernel(WeightKind kind) {
  return kind == WeightKind::int8 ? rows_int8<rows> : rows_int4<rows>;
}

template <int panels>
RowsKernel rows_kernel(WeightKind kind, int64_t rows) {
  const bool is_integer = is_quantized(kind);
  switch (rows) {
    case 1: return is_integer ? integer_kernel<1>(kind) : float_kernel<1, panels>(kind);
    case 2: return is_integer ? integer_kernel<2>(kind) : float_kernel<2, panels>(kind);
    case 3: return is_integer ? integer_kernel<3>(kind) : float_kernel<3, 1>(kind);
    case 4: return is_integer ? integer_kernel<4>(kind) : float_kernel<4, 1>(kind);
    case 5: return float_kernel<5, 1>(kind);
    default: return float_kernel<6, 1>(kind);
  }
}

inline void multiply_rows(const Product& p, const Part& part) {
  const RowsKernel one = rows_kernel<1>(p.weight.kind, p.input.height), two = rows_kernel<2>(p.weight.kind, p.input.height);
  const bool pairs = !is_quantized(p.weight.kind) && p.input.height <= 2;
  int64_t panel = part.panel_begin;
  for (; pairs && panel + 1 < part.panel_end; panel += 2) {
    for (int64_t group = part.group_begin; group < part.group_end; ++group) two(p, panel, group);
  }
  for (; panel < part.panel_end; ++panel) {
    for (int64_t group = part.group_begin; group < part.group_end; ++group) one(p, panel, group);
  }
}

}  // namespace sage::linear
