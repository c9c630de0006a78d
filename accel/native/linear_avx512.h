// Products with AVX-512 (BF16 and VNNI): up to 8 rows by one panel, 16 accumulators, activations broadcast from memory.
//
// The dot products are inline assembly: with the intrinsics g++ 12 spills the accumulators, at half the speed.
#pragma once
#include "linear_codes.h"
#include "linear_epilogue.h"

namespace sage::linear {

#define SAGE_INLINE inline __attribute__((always_inline))

// sum += weights . activations, where a quad of activations is broadcast to all lanes.
template <WeightKind kind>
SAGE_INLINE void dot(__m512i& sum, __m512i weights, const unsigned char* quad) {
  const auto& memory = *reinterpret_cast<const int32_t*>(quad);
  if constexpr (kind == WeightKind::bf16) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(memory));
  } else {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(memory));
  }
}

// A vector of weights that several operations take: compilers would load it for each of them.
SAGE_INLINE __m512i load_once(const unsigned char* at) {
  __m512i weights = _mm512_load_si512(at);
  asm("" : "+v"(weights));
  return weights;
}

// Four quads of numbers in 6 bits, 0 ... 63, of half a panel.
struct Sixes {
  __m512i first, second, third, fourth;
};

SAGE_INLINE Sixes sixes_of(const unsigned char* at) {
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(0x30);
  const __m512i one = load_once(at), two = load_once(at + kHalfBytes), bits = load_once(at + 2 * kHalfBytes);
  const auto both = [&](__m512i nibbles, __m512i shifted) __attribute__((always_inline)) {
    return _mm512_ternarylogic_epi64(_mm512_and_si512(shifted, high), nibbles, low, 0xf8);  // a | (b & c)
  };
  return {both(one, _mm512_slli_epi16(bits, 4)), both(_mm512_srli_epi16(one, 4), _mm512_slli_epi16(bits, 2)), both(two, bits),
          both(_mm512_srli_epi16(two, 4), _mm512_srli_epi16(bits, 2))};
}

// Lines of the next panel that are fetched into L2 while this one is multiplied, a few at each step.
struct Ahead {
  const unsigned char* at;
  const unsigned char* end;
  int64_t lines_per_step;

  SAGE_INLINE void step() {
    for (int64_t i = 0; i < lines_per_step && at < end; ++i, at += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    }
  }
};

template <int rows>
struct Sums {
  alignas(64) float left[rows * kLanes];
  alignas(64) float right[rows * kLanes];
};

// bf16: one chain of dots per output, in the order of k. All loops over rows are unrolled, as the accumulators stay in
// registers only where no array is left.
template <int rows>
__attribute__((noinline)) static void rows_bf16(const Product& p, int64_t panel, int64_t row_group, const unsigned char* at,
                                                const unsigned char* end, int64_t lines_per_step) {
  Ahead ahead{at, end, lines_per_step};
  const unsigned char* weights = p.panel(panel);
  const unsigned char* activations = p.rows_at(row_group);
  const int64_t num_steps = p.input.depth.num_steps(), height = p.input.height;
  __m512i left[rows], right[rows];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) left[row] = right[row] = _mm512_setzero_si512();
  for (int64_t step = 0; step < num_steps; ++step, activations += (height - 1) * 64) {
    ahead.step();
    for (int quad = 0; quad < 16; ++quad, weights += kLineBytes, activations += 4) {
      const __m512i w0 = _mm512_load_si512(weights), w1 = _mm512_load_si512(weights + kHalfBytes);
#pragma GCC unroll 8
      for (int row = 0; row < rows; ++row) {
        dot<WeightKind::bf16>(left[row], w0, activations + row * 64);
        dot<WeightKind::bf16>(right[row], w1, activations + row * 64);
      }
    }
  }
  Sums<rows> sums;
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
    store(sums.left + row * kLanes, _mm512_castsi512_ps(left[row]));
    store(sums.right + row * kLanes, _mm512_castsi512_ps(right[row]));
  }
  finish(p, panel, p.first_row(row_group), p.num_rows(row_group), sums.left, sums.right);
}

// Weights that are codes, expanded to bf16 in registers: the chains of `rows_bf16`, and so its bits.
template <Code code, bool is_shifted, int rows>
static void rows_codes(const Product& p, int64_t panel) {
  const CodedLayout layout(p.weight);
  const unsigned char* at = p.weight.data + panel * layout.panel_bytes;
  const unsigned char* activations = p.rows_at(0);
  __m512i left[rows], right[rows];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) left[row] = right[row] = _mm512_setzero_si512();
  for (int64_t block = 0; block < layout.num_blocks; ++block, activations += p.input.height * 64) {
    const unsigned char* codes = at + layout.codes_at(block);
    const auto add_half = [&](__m512i (&sums)[rows], int64_t half) __attribute__((always_inline)) {
      Set set = set_of<code, is_shifted>(p.weight, layout, at, layout.set_of(block, 0), half);
      for (int64_t part = 0; part < 2; ++part) {
        if (part == 1 && layout.sets_per_unit == 2) {
          set = set_of<code, is_shifted>(p.weight, layout, at, layout.set_of(block, 1), half);
        }
        for_pairs<code, is_shifted>(codes, set, part, half, [&](const Pair& x, int64_t pair) __attribute__((always_inline)) {
          const __m512i weights = as_bf16(x);
#pragma GCC unroll 8
          for (int row = 0; row < rows; ++row) dot<WeightKind::bf16>(sums[row], weights, activations + row * 64 + pair * 4);
        });
      }
    };
    add_half(left, 0);
    add_half(right, 1);
  }
  Sums<rows> sums;
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
    store(sums.left + row * kLanes, _mm512_castsi512_ps(left[row]));
    store(sums.right + row * kLanes, _mm512_castsi512_ps(right[row]));
  }
  finish(p, panel, 0, p.input.rows, sums.left, sums.right);
}

// Rows that products with codes are expanded in registers for.
constexpr int64_t kRowsOfCodes = 4;

inline void multiply_codes_in_registers(const Product& p, const Part& part) {
  using Kernel = void (*)(const Product&, int64_t);
  const auto kernel = of_coding<Kernel>(p.weight, [&](auto code, auto is_shifted) -> Kernel {
    switch (p.input.rows) {
      case 1: return rows_codes<code(), is_shifted(), 1>;
      case 2: return rows_codes<code(), is_shifted(), 2>;
      case 3: return rows_codes<code(), is_shifted(), 3>;
      default: return rows_codes<code(), is_shifted(), 4>;
    }
  });
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) kernel(p, panel);
}

// Integers are stored plus an excess, so each group of a row starts at -excess * sum. A group's set is read after its
// codes: read first, it breaks the stream that the prefetcher sees.
template <WeightKind kind, bool is_shifted, int rows>
__attribute__((noinline)) static void rows_integers(const Product& p, int64_t panel, int64_t row_group, const unsigned char* at,
                                                    const unsigned char* end, int64_t lines_per_step) {
  constexpr bool in_bytes = kind == WeightKind::int8 || kind == WeightKind::int8_groups;
  const int32_t excess = in_bytes ? 128 : excess_of(p.weight);
  Ahead ahead{at, end, lines_per_step};
  const Depth& depth = p.input.depth;
  const int64_t first = p.first_row(row_group), count = p.num_rows(row_group), height = p.input.height;
  const unsigned char* activations = p.rows_at(row_group);
  const float* scales = p.scales;  // copies: stores to `sums` might change what `p` refers to
  const int32_t* row_sums = p.sums;
  const int64_t num_groups = depth.num_groups;
  for (int64_t i = 0; i < p.panels.sets.factors_end; i += 64) prefetch(p.panel(panel) + i);
  GroupWalk place(p.panels, p.panel(panel));
  Sums<rows> sums;
  for (int64_t group = 0; group < num_groups; ++group, place.next()) {
    const unsigned char* weights = place.codes;
    const auto index = [&](int64_t row) { return (first + (row < count ? row : 0)) * num_groups + group; };
    __m512i left[rows], right[rows];
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) left[row] = right[row] = all_ints(-excess * row_sums[index(row)]);
    for (int64_t step = 0; step < depth.steps_per_group; ++step, activations += height * depth.step_bytes) {
      ahead.step();
      if constexpr (kind == WeightKind::int4) {
        const __m512i low_bits = _mm512_set1_epi8(15);
        for (int64_t k = 0; k < depth.step_bytes; k += 8, weights += kLineBytes) {
          const __m512i w0 = load_once(weights), w1 = load_once(weights + kHalfBytes);
          const __m512i low0 = _mm512_and_si512(w0, low_bits), low1 = _mm512_and_si512(w1, low_bits);
          const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(w0, 4), low_bits);
          const __m512i high1 = _mm512_and_si512(_mm512_srli_epi16(w1, 4), low_bits);
#pragma GCC unroll 8
          for (int row = 0; row < rows; ++row) {
            const unsigned char* quad = activations + row * depth.step_bytes + k;
            dot<kind>(left[row], low0, quad);
            dot<kind>(right[row], low1, quad);
            dot<kind>(left[row], high0, quad + 4);
            dot<kind>(right[row], high1, quad + 4);
          }
        }
      } else if constexpr (kind == WeightKind::int6) {
        for (int64_t k = 0; k < depth.step_bytes; k += 16, weights += 3 * kLineBytes) {
          const auto add_half = [&](__m512i (&sums)[rows], const unsigned char* at) __attribute__((always_inline)) {
            const auto [first, second, third, fourth] = sixes_of(at);
#pragma GCC unroll 8
            for (int row = 0; row < rows; ++row) {
              const unsigned char* quad = activations + row * depth.step_bytes + k;
              dot<kind>(sums[row], first, quad);
              dot<kind>(sums[row], second, quad + 4);
              dot<kind>(sums[row], third, quad + 8);
              dot<kind>(sums[row], fourth, quad + 12);
            }
          };
          add_half(left, weights);
          add_half(right, weights + 3 * kHalfBytes);
        }
      } else {
        const int64_t step_bytes = kind == WeightKind::int8 ? 64 : depth.step_bytes;
        const unsigned char* quad = activations;
        for (int64_t k = 0; k < step_bytes; k += 4, quad += 4, weights += kLineBytes) {
          const __m512i w0 = _mm512_load_si512(weights), w1 = _mm512_load_si512(weights + kHalfBytes);
#pragma GCC unroll 8
          for (int row = 0; row < rows; ++row) {
            dot<kind>(left[row], w0, quad + row * step_bytes);
            dot<kind>(right[row], w1, quad + row * step_bytes);
          }
        }
      }
    }
    const GroupSet<is_shifted> left_set(p.weight, p.panels.sets, place.set, place.factors, 0);
    const GroupSet<is_shifted> right_set(p.weight, p.panels.sets, place.set, place.factors, 1);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      const auto add = [&](const GroupSet<is_shifted>& set, float* to, __m512i product) __attribute__((always_inline)) {
        const Vec sum = kind == WeightKind::int8 || group == 0 ? zero() : load(to);
        store(to, set.plus(sum, product, scales[index(row)], row_sums[index(row)]));
      };
      add(left_set, sums.left + row * kLanes, left[row]);
      add(right_set, sums.right + row * kLanes, right[row]);
    }
  }
  finish(p, panel, first, count, sums.left, sums.right);
}

template <int rows>
__attribute__((noinline)) static void rows_f32(const Product& p, int64_t panel, int64_t row_group, const unsigned char* at,
                                                const unsigned char* end, int64_t lines_per_step) {
  Ahead ahead{at, end, lines_per_step};
  const unsigned char* weights = p.panel(panel);
  const unsigned char* activations = p.rows_at(row_group);
  __m512 left[rows], right[rows];
  for (int row = 0; row < rows; ++row) left[row] = right[row] = _mm512_setzero_ps();
  for (int64_t step = 0; step < p.input.depth.num_steps(); ++step, activations += p.input.height * 64) {
    ahead.step();
    for (int64_t i = 0; i < 16; ++i, weights += kLineBytes) {
      const __m512 w0 = _mm512_load_ps(weights), w1 = _mm512_load_ps(weights + kHalfBytes);
#pragma GCC unroll 8
      for (int row = 0; row < rows; ++row) {
        const __m512 x = _mm512_set1_ps(reinterpret_cast<const float*>(activations + row * 64)[i]);
        left[row] = _mm512_fmadd_ps(w0, x, left[row]);
        right[row] = _mm512_fmadd_ps(w1, x, right[row]);
      }
    }
  }
  Sums<rows> sums;
  for (int row = 0; row < rows; ++row) {
    store(sums.left + row * kLanes, left[row]);
    store(sums.right + row * kLanes, right[row]);
  }
  finish(p, panel, p.first_row(row_group), p.num_rows(row_group), sums.left, sums.right);
}

// `Ahead` comes in registers: from memory it could be read only when all stores before have ended.
using RowsKernel = void (*)(const Product&, int64_t panel, int64_t row_group, const unsigned char* at,
                            const unsigned char* end, int64_t lines_per_step);

template <int rows>
RowsKernel kernel_of(const Weight& w) {
  const bool is_shifted = w.coding.has_zeros || w.coding.has_offsets;
  constexpr auto int4 = WeightKind::int4, int6 = WeightKind::int6, groups = WeightKind::int8_groups;
  switch (w.kind) {
    case WeightKind::int4: return is_shifted ? rows_integers<int4, true, rows> : rows_integers<int4, false, rows>;
    case WeightKind::int6: return is_shifted ? rows_integers<int6, true, rows> : rows_integers<int6, false, rows>;
    case WeightKind::int8_groups: return is_shifted ? rows_integers<groups, true, rows> : rows_integers<groups, false, rows>;
    case WeightKind::f32: return rows_f32<rows>;
    case WeightKind::bf16: return rows_bf16<rows>;
    default: return rows_integers<WeightKind::int8, false, rows>;
  }
}

inline RowsKernel rows_kernel(const Weight& w, int64_t rows) {
  switch (rows) {
    case 1: return kernel_of<1>(w);
    case 2: return kernel_of<2>(w);
    case 3: return kernel_of<3>(w);
    case 4: return kernel_of<4>(w);
    case 5: return kernel_of<5>(w);
    case 6: return kernel_of<6>(w);
    case 7: return kernel_of<7>(w);
    default: return kernel_of<8>(w);
  }
}

// While a panel is read once, Zen 4's own prefetcher does better than software (8 rows in bf16: 34 GB/s against 28), Intel's
// does not.
constexpr int64_t kRowsWithoutPrefetch = kHasTiles ? 0 : 8;

inline void multiply_rows(const Product& p, const Part& part) {
  const RowsKernel kernel = rows_kernel(p.weight, p.input.height);
  const int64_t steps = p.input.depth.num_steps() * (part.group_end - part.group_begin);
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    Ahead ahead{nullptr, nullptr, 0};
    if (p.input.rows > kRowsWithoutPrefetch && panel + 1 < p.panels.num_panels) {
      ahead = {p.panel(panel + 1), p.panel(panel + 2), ceil_div(p.panels.panel_bytes / 64, steps)};
    }
    for (int64_t group = part.group_begin; group < part.group_end; ++group) {
      kernel(p, panel, group, ahead.at, ahead.end, ahead.lines_per_step);
      ahead.at += p.input.depth.num_steps() * ahead.lines_per_step * 64;
    }
  }
}

}  // namespace sage::linear
