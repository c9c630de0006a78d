// From stored tensors to packed weights.
#pragma once
#include <cstdint>

#include "linear.h"

namespace sage {

enum class Stored : int32_t { bf16 = 0, f16 = 1, f32 = 2, f64 = 3 };
enum class Finding : int { ok = 0, not_finite = 1, too_large = 2 };

// Packs outputs [begin, begin + count) of a matrix in bf16 or f32 from contiguous stored rows.
Finding pack_rows(const Weight&, int64_t begin, int64_t count, Stored, const void* rows, int num_threads);

// The same in int8 or int4; raises `max_error` to the largest error in steps.
Finding quantize_rows(const Weight&, int64_t begin, int64_t count, Stored, const void* rows, float clip_ratio,
                      float* max_error, int num_threads, bool search_scales);

// Packs outputs from codes.
void pack_coded_rows(const Weight&, int64_t begin, int64_t count, const CodedRows&, int num_threads);

// Converts values to bf16 or f32.
Finding convert(Stored, const void* values, int64_t count, Stored target, void* out, int num_threads);

}  // namespace sage
