// Weights as integers with scales, by the formulas of the package's Python quantizers.
#pragma once
#include <cstdint>

#include "linear.h"

namespace sage {

// Rounds one row of k weights to integers: int8 (-127 ... 127, one scale) or int4 (-8 ... 7, a scale per
// `group`; with `search_scales` the one of several with the least squared error). Scales are rounded up to 8
// significant bits.
// Returns false, and leaves the outputs undefined, if a weight is NaN or infinite.
bool quantize_row(WeightKind kind, const float* row, int64_t k, int64_t group, float clip_ratio,
                  bool search_scales, int8_t* codes, float* scales);

}  // namespace sage
