// What happens to the sums of a panel: bias, silu(gate) * up, store or add.
#pragma once
#include <cstring>

#include "linear_layout.h"

namespace sage::linear {

inline void emit(const Product& p, float* out, Vec value, int64_t count) {
  if (count >= kLanes) {
    store(out, p.into == Into::add ? add(load(out), value) : value);
  } else if (count > 0) {
    store(out, p.into == Into::add ? add(load(out, count), value) : value, count);
  }
}

inline void feed(const Next& next, int64_t row, int64_t column, Vec value) {
  unsigned char* to = next.at(row, column);
#if defined(__AVX512BF16__)
  if (next.is_bf16) {
    const __m256bh rounded = _mm512_cvtneps_pbh(value);
    std::memcpy(to, &rounded, sizeof rounded);
    return;
  }
#endif
  store(reinterpret_cast<float*>(to), value);
}

// `left` and `right` are the two halves of the panel's sums, one vector per row. Not inlined: the bits of a result
// must not depend on what the compiler would contract with a caller's arithmetic.
__attribute__((noinline)) static void finish(const Product& p, int64_t panel, int64_t first_row, int64_t num_rows,
                                             const float* left, const float* right) {
  const int64_t column = panel * p.panels.width, left_over = p.panels.num_outputs - column;
  const float* bias = p.weight.bias;
  Vec left_bias = zero(), right_bias = zero();
  if (bias != nullptr) {
    left_bias = load(bias + column, left_over);
    const float* other = bias + column + (p.weight.is_gated ? p.weight.n / 2 : kLanes);
    const int64_t other_left = p.weight.is_gated ? left_over : left_over - kLanes;
    if (other_left > 0) right_bias = load(other, other_left);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    Vec a = load(left + row * kLanes), b = load(right + row * kLanes);
    if (bias != nullptr) a = add(a, left_bias), b = add(b, right_bias);
    if (p.next != nullptr) {
      feed(*p.next, first_row + row, column, mul(silu(a), b));
      continue;
    }
    float* out = p.out + (first_row + row) * p.stride + column;
    if (p.weight.is_gated) {
      emit(p, out, mul(silu(a), b), left_over);
    } else {
      emit(p, out, a, left_over);
      emit(p, out + kLanes, b, left_over - kLanes);
    }
  }
}

}  // namespace sage::linear
