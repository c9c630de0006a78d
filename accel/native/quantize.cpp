#include "quantize.h"

#include <cfloat>
#include <cmath>
#include <cstring>

namespace sage {
namespace {

// Few cut weights cost less than coarser steps for all others; the same list as in int4.py.
constexpr float kShrinks[] = {1.0f, 0.93f, 0.86f, 0.79f, 0.72f};

// Rounds a positive number up to the next one with 8 significant bits, which bf16 holds exactly.
float round_up(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  bits = (bits + 0xFFFF) & ~0xFFFFu;
  std::memcpy(&scale, &bits, sizeof bits);
  return scale;
}

// Plain comparisons and lanes of sums: what a compiler turns into vectors without changing any result.
constexpr int64_t kLanes = 16;

// The largest magnitude, or infinity or NaN if there is one: without their sign, floats sort as integers.
float largest_magnitude(const float* row, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, row + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  return magnitude;
}

// The nearest integer, ties to even, within the range. The sum has no fraction bits, so it rounds.
inline float code_of(float weight, float scale, float lowest, float highest) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  const float code = (weight / scale + kShift) - kShift;
  return code < lowest ? lowest : code > highest ? highest : code;
}

float squared_error(const float* row, int64_t count, float scale, float lowest, float highest) {
  float sums[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  const auto squared = [&](int64_t i) {
    const float error = code_of(row[i], scale, lowest, highest) * scale - row[i];
    return error * error;
  };
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; lane++) sums[lane] += squared(i + lane);
  float sum = 0;
  for (int64_t i = whole; i < count; i++) sum += squared(i);
  for (const float each : sums) sum += each;
  return sum;
}

float scale_of_least_error(const float* row, int64_t count, float widest) {
  float best = widest, least = INFINITY;
  for (const float shrink : kShrinks) {
    const float scale = round_up(widest * shrink);
    const float error = squared_error(row, count, scale, -8, 7);
    if (error < least) best = scale, least = error;
  }
  return best;
}

}  // namespace

bool quantize_row(WeightKind kind, const float* row, int64_t k, int64_t group, float clip_ratio,
                  bool search_scales, int8_t* codes, float* scales) {
  const bool is_int4 = kind == WeightKind::int4;
  const float lowest = is_int4 ? -8 : -127, highest = is_int4 ? 7 : 127;
  const int64_t size = is_int4 ? group : k;
  for (int64_t begin = 0; begin < k; begin += size) {
    const float* part = row + begin;
    const float largest = largest_magnitude(part, size);
    if (!std::isfinite(largest)) return false;
    const float unrounded = largest * (clip_ratio / highest);
    float scale = round_up(unrounded > FLT_MIN ? unrounded : FLT_MIN);
    if (is_int4 && search_scales) scale = scale_of_least_error(part, size, scale);
    for (int64_t i = 0; i < size; i++) codes[begin + i] = static_cast<int8_t>(code_of(part[i], scale, lowest, highest));
    scales[begin / size] = scale;
  }
  return true;
}

}  // namespace sage
