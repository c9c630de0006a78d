// Products with AVX2 and FMA: up to 6 rows by one panel of 16 outputs, 12 vectors of sums.
//
// bf16 weights are widened to float32 by a shift and a mask; int8 ones to 16 bits, which an exact product of pairs takes.
// int4 and int6: the weights are the unsigned operand of a product of bytes, of which some add up in 16 bits first.
//
// Sums of integers are added by inline assembly: with the intrinsics g++ 12 changes their order, and has too few registers then.
#pragma once
#include "linear_epilogue.h"

namespace sage::linear {

#define SAGE_INLINE inline __attribute__((always_inline))

template <int rows, int panels = 1>
struct Sums {
  alignas(32) float left[panels][rows * kLanes];
  alignas(32) float right[panels][rows * kLanes];
};

SAGE_INLINE __m256i load_quads(const unsigned char* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }
SAGE_INLINE __m256i same_quads(const unsigned char* at) {
  return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(at)));
}

// Even and odd inputs of a line of bf16 pairs as floats.
SAGE_INLINE __m256 even_inputs(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
SAGE_INLINE __m256 odd_inputs(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// Each of several panels keeps the order of its sums.
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
#pragma GCC unroll 4
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
      store(sums.left[i] + row * kLanes, left[i][row]);
      store(sums.right[i] + row * kLanes, right[i][row]);
    }
  }
  for (int i = 0; i < panels; ++i) {
    finish(p, panel + i, p.first_row(row_group), rows, sums.left[i], sums.right[i]);
  }
}

// Weights of a panel's two vectors of outputs.
struct Vectors {
  __m256i left, right;
};

// body(weights, half) for both halves of a line, widened: of int8 the inputs 0 and 2 and then 1 and 3 of a quad, of int4 one
// quad and the next.
template <WeightKind kind, class Body>
SAGE_INLINE void for_halves(const unsigned char* line, const Body& body) {
  const auto widened = [&](const auto& widen) { return Vectors{widen(load_quads(line)), widen(load_quads(line + kHalfBytes))}; };
  if constexpr (kind == WeightKind::int8) {
    body(widened([](__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }), 0);
    body(widened([](__m256i x) { return _mm256_srai_epi16(x, 8); }), 1);
  } else {
    body(widened([](__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }), 0);
    body(widened([](__m256i x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }), 1);
  }
}

SAGE_INLINE void add_pairs(__m256i& sum, __m256i words, __m256i x) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(words, x)));
}

// Exact products of one group, added to the sums of the panels; `place` is that of the first.
template <int rows, int panels>
SAGE_INLINE void add_group(const Product& p, const GroupWalk& place, int64_t row_group, int64_t group,
                           const __m256i (&left)[panels][rows], const __m256i (&right)[panels][rows], Sums<rows, panels>& sums) {
#pragma GCC unroll 4
  for (int i = 0; i < panels; ++i) {
    const unsigned char *set = place.set + i * p.panels.panel_bytes, *factors = place.factors + i * p.panels.panel_bytes;
    const GroupSet<> left_set(p.weight, p.panels.sets, set, factors, 0), right_set(p.weight, p.panels.sets, set, factors, 1);
#pragma GCC unroll 6
    for (int row = 0; row < rows; ++row) {
      const int64_t index = (p.first_row(row_group) + row) * p.input.depth.num_groups + group;
      const auto add = [&](const GroupSet<>& set, float* to, __m256i product) {
        store(to, set.plus(group == 0 ? zero() : load(to), product, p.scales[index], p.sums[index]));
      };
      add(left_set, sums.left[i] + row * kLanes, left[i][row]);
      add(right_set, sums.right[i] + row * kLanes, right[i][row]);
    }
  }
}

// What a group's products start at: minus what the stored excess adds.
template <int rows, int panels>
SAGE_INLINE void start_group(const Product& p, int64_t row_group, int64_t group, int32_t excess,
                             __m256i (&left)[panels][rows], __m256i (&right)[panels][rows]) {
#pragma GCC unroll 6
  for (int row = 0; row < rows; ++row) {
    const int32_t sum = p.sums[(p.first_row(row_group) + row) * p.input.depth.num_groups + group];
#pragma GCC unroll 4
    for (int i = 0; i < panels; ++i) left[i][row] = right[i][row] = all_ints(-excess * sum);
  }
}

// Panels of integers: add_step(weights, activations, left, right) adds the products of a step, and moves on in the weights.
template <int rows, int panels, class Step>
SAGE_INLINE void rows_integers(const Product& p, int64_t panel, int64_t row_group, int32_t excess, const Step& add_step) {
  const Depth& depth = p.input.depth;
  const unsigned char* activations = p.rows_at(row_group);
  Sums<rows, panels> sums;
  GroupWalk place(p.panels, p.panel(panel));
  for (int64_t group = 0; group < depth.num_groups; ++group, place.next()) {
    const unsigned char* weights = place.codes;
    __m256i left[panels][rows], right[panels][rows];
    start_group<rows, panels>(p, row_group, group, excess, left, right);
    for (int64_t step = 0; step < depth.steps_per_group; ++step, activations += p.input.block_bytes()) {
      add_step(weights, activations, left, right);
    }
    add_group<rows, panels>(p, place, row_group, group, left, right, sums);
  }
  for (int i = 0; i < panels; ++i) finish(p, panel + i, p.first_row(row_group), rows, sums.left[i], sums.right[i]);
}

template <int rows, int panels>
__attribute__((noinline)) static void rows_int8(const Product& p, int64_t panel, int64_t row_group) {
  const Depth& depth = p.input.depth;
  rows_integers<rows, panels>(p, panel, row_group, 0, [&](const unsigned char*& weights, const unsigned char* activations, auto& left,
                              auto& right) __attribute__((always_inline)) {
    for (int64_t at = 0; at < depth.step_bytes; at += 8, weights += kLineBytes) {
#pragma GCC unroll 4
      for (int i = 0; i < panels; ++i) {
        const unsigned char* line = weights + i * p.panels.panel_bytes;
        for_halves<WeightKind::int8>(line, [&](const Vectors& w, int64_t half) __attribute__((always_inline)) {
#pragma GCC unroll 6
          for (int row = 0; row < rows; ++row) {
            const __m256i x = same_quads(activations + row * depth.step_bytes + at + half * 4);
            add_pairs(left[i][row], w.left, x);
            add_pairs(right[i][row], w.right, x);
          }
        });
      }
    }
  });
}

SAGE_INLINE void add_bytes(__m256i& sum, __m256i nibbles, __m256i x) {
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(nibbles, x)));
}

SAGE_INLINE __m256i words_added(__m256i sum, __m256i words) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}

// Sums of 8 pairs of products fit 16 bits: 8 * 2 * 15 * 127.
template <int rows, int panels>
__attribute__((noinline)) static void rows_int4(const Product& p, int64_t panel, int64_t row_group) {
  const Depth& depth = p.input.depth;
  rows_integers<rows, panels>(p, panel, row_group, excess_of(p.weight), [&](const unsigned char*& weights, const unsigned char* activations, auto& left,
                              auto& right) __attribute__((always_inline)) {
    for (int64_t k = 0; k < depth.step_bytes; k += 32) {
      __m256i left_words[panels][rows], right_words[panels][rows];
#pragma GCC unroll 4
      for (int i = 0; i < panels; ++i) {
#pragma GCC unroll 6
        for (int row = 0; row < rows; ++row) left_words[i][row] = right_words[i][row] = _mm256_setzero_si256();
      }
      for (int64_t at = k; at < k + 32; at += 8, weights += kLineBytes) {
#pragma GCC unroll 4
        for (int i = 0; i < panels; ++i) {
          const unsigned char* line = weights + i * p.panels.panel_bytes;
          for_halves<WeightKind::int4>(line, [&](const Vectors& w, int64_t half) __attribute__((always_inline)) {
#pragma GCC unroll 6
            for (int row = 0; row < rows; ++row) {
              const __m256i x = same_quads(activations + row * depth.step_bytes + at + half * 4);
              add_bytes(left_words[i][row], w.left, x);
              add_bytes(right_words[i][row], w.right, x);
            }
          });
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < panels; ++i) {
#pragma GCC unroll 6
        for (int row = 0; row < rows; ++row) {
          left[i][row] = words_added(left[i][row], left_words[i][row]);
          right[i][row] = words_added(right[i][row], right_words[i][row]);
        }
      }
    }
  });
}

// Four quads of numbers in 6 bits, 0 ... 63, of half a panel: body(quad, index).
template <class Body>
SAGE_INLINE void for_sixes(const unsigned char* at, const Body& body) {
  const __m256i low = _mm256_set1_epi8(15), high = _mm256_set1_epi8(0x30);
  const __m256i one = load_quads(at), two = load_quads(at + kHalfBytes), bits = load_quads(at + 2 * kHalfBytes);
  const auto both = [&](__m256i nibbles, __m256i shifted) {
    return _mm256_or_si256(_mm256_and_si256(nibbles, low), _mm256_and_si256(shifted, high));
  };
  body(both(one, _mm256_slli_epi16(bits, 4)), 0);
  body(both(_mm256_srli_epi16(one, 4), _mm256_slli_epi16(bits, 2)), 1);
  body(both(two, bits), 2);
  body(both(_mm256_srli_epi16(two, 4), _mm256_srli_epi16(bits, 2)), 3);
}

// Sums of two pairs of products fit 16 bits, 4 * 63 * 127: words are widened after every other quad.
template <int rows, int panels>
__attribute__((noinline)) static void rows_int6(const Product& p, int64_t panel, int64_t row_group) {
  const Depth& depth = p.input.depth;
  rows_integers<rows, panels>(p, panel, row_group, excess_of(p.weight), [&](const unsigned char*& weights, const unsigned char* activations, auto& left,
                              auto& right) __attribute__((always_inline)) {
    for (int64_t k = 0; k < depth.step_bytes; k += 16, weights += 3 * kLineBytes) {
      const auto add_half = [&](__m256i (&to)[rows], const unsigned char* at) __attribute__((always_inline)) {
        __m256i words[rows];
        for_sixes(at, [&](__m256i quad, int64_t index) __attribute__((always_inline)) {
#pragma GCC unroll 6
          for (int row = 0; row < rows; ++row) {
            const __m256i x = same_quads(activations + row * depth.step_bytes + k + index * 4);
            if (index % 2 == 0) {
              words[row] = _mm256_maddubs_epi16(quad, x);
            } else {
              to[row] = words_added(to[row], _mm256_add_epi16(words[row], _mm256_maddubs_epi16(quad, x)));
            }
          }
        });
      };
#pragma GCC unroll 4
      for (int i = 0; i < panels; ++i) {
        const unsigned char* at = weights + i * p.panels.panel_bytes;
        add_half(left[i], at);
        add_half(right[i], at + 3 * kHalfBytes);
      }
    }
  });
}

using RowsKernel = void (*)(const Product&, int64_t panel, int64_t row_group);

template <int rows, int panels>
RowsKernel kernel_of(WeightKind kind) {
  switch (kind) {
    case WeightKind::bf16: return rows_float<WeightKind::bf16, rows, panels>;
    case WeightKind::f32: return rows_float<WeightKind::f32, rows, panels>;
    case WeightKind::int4: return rows_int4<rows, panels>;
    case WeightKind::int6: return rows_int6<rows, panels>;
    default: return rows_int8<rows, panels>;
  }
}

// Several panels are walked at once where few rows leave registers for them: the memory gives more to more streams.
constexpr int64_t panels_together(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

inline RowsKernel rows_kernel(WeightKind kind, int64_t rows, bool together) {
  switch (rows) {
    case 1: return together ? kernel_of<1, panels_together(1)>(kind) : kernel_of<1, 1>(kind);
    case 2: return together ? kernel_of<2, panels_together(2)>(kind) : kernel_of<2, 1>(kind);
    case 3: return kernel_of<3, 1>(kind);
    case 4: return kernel_of<4, 1>(kind);
    case 5: return kernel_of<5, 1>(kind);
    default: return kernel_of<6, 1>(kind);
  }
}

inline void multiply_rows(const Product& p, const Part& part) {
  const RowsKernel whole = rows_kernel(p.weight.kind, p.input.height, false);
  const RowsKernel last = rows_kernel(p.weight.kind, p.num_rows(part.group_end - 1), false);  // may have fewer rows
  const RowsKernel together = rows_kernel(p.weight.kind, p.input.height, true);
  const int64_t count = part.group_end - part.group_begin == 1 ? panels_together(p.input.height) : 1;
  int64_t panel = part.panel_begin;
  for (; count > 1 && panel + count <= part.panel_end; panel += count) together(p, panel, part.group_begin);
  for (; panel < part.panel_end; ++panel) {
    for (int64_t group = part.group_begin; group + 1 < part.group_end; ++group) whole(p, panel, group);
    last(p, panel, part.group_end - 1);
  }
}

}  // namespace sage::linear
