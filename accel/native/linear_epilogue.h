// What happens to the sums of a panel: bias, silu(gate) * up, store or add.
#pragma once
#include <cstring>

#include "linear_layout.h"

namespace sage::linear {

inline void emit(float* out, bool adds, Vec value) { store(out, adds ? add(load(out), value) : value); }

// The same for the first `count` lanes alone, if it has fewer.
inline void emit(float* out, bool adds, Vec value, int64_t count) {
  if (count >= kLanes) {
    emit(out, adds, value);
  } else if (count > 0) {
    store(out, adds ? add(load(out, count), value) : value, count);
  }
}

// Where a column of the next product's input lies, row after row.
class NextRows {
 public:
  NextRows(const Next& next, int64_t row, int64_t column)
      : height_(next.layout.height), row_(row % height_), row_bytes_(next.layout.depth.step_bytes),
        rest_(next.layout.row_group_bytes() - height_ * row_bytes_), is_bf16_(next.is_bf16), at_(next.at(row, column)) {}

  void put(Vec value) {
#if defined(__AVX512BF16__)
    if (is_bf16_) {
      const __m256bh rounded = _mm512_cvtneps_pbh(value);
      std::memcpy(at_, &rounded, sizeof rounded);
      return advance();
    }
#endif
    store(reinterpret_cast<float*>(at_), value);
    advance();
  }

 private:
  void advance() {
    at_ += row_bytes_;
    if (++row_ < height_) return;
    at_ += rest_;
    row_ = 0;
  }

  int64_t height_, row_, row_bytes_, rest_;
  [[maybe_unused]] bool is_bf16_;
  unsigned char* at_;
};

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
  const auto for_rows = [=](const auto& put) {
    for (int64_t row = 0; row < num_rows; ++row) {
      Vec a = load(left + row * kLanes), b = load(right + row * kLanes);
      if (bias != nullptr) a = add(a, left_bias), b = add(b, right_bias);
      put(a, b);
    }
  };
  if (p.next != nullptr) {
    NextRows to(*p.next, first_row, column);
    return for_rows([&](Vec a, Vec b) { to.put(mul(silu(a), b)); });
  }
  const bool adds = p.into == Into::add;
  const int64_t stride = p.stride;
  float* out = p.out + first_row * stride + column;
  if (p.weight.is_gated) {
    return for_rows([&](Vec a, Vec b) {
      emit(out, adds, mul(silu(a), b), left_over);
      out += stride;
    });
  }
  if (left_over < 2 * kLanes) {
    return for_rows([&](Vec a, Vec b) {
      emit(out, adds, a, left_over);
      emit(out + kLanes, adds, b, left_over - kLanes);
      out += stride;
    });
  }
  for_rows([&](Vec a, Vec b) {
    emit(out, adds, a);
    emit(out + kLanes, adds, b);
    out += stride;
  });
}

}  // namespace sage::linear
