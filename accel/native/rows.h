// What happens to single rows between products: norms and rotations, in float32.
#pragma once
#include <cmath>
#include <cstdint>

namespace sage {

constexpr int kPartialSums = 16;  // partial sums: the same order in every build, so that compilers may use vectors

// 1 / sqrt(mean(x²) + eps)
inline float inverse_rms(const float* x, int64_t size, float eps) {
  float sums[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= size; i += kPartialSums)
    for (int lane = 0; lane < kPartialSums; lane++) sums[lane] += x[i + lane] * x[i + lane];
  for (; i < size; i++) sums[i % kPartialSums] += x[i] * x[i];
  for (int half = kPartialSums / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  return 1.0f / std::sqrt(sums[0] / static_cast<float>(size) + eps);
}

// out = x / rms(x) * weight; out may be x.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  const float factor = inverse_rms(x, size, eps);
  for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

// Rotates the pairs (i, i + half) of a head, in place.
inline void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace sage
