// The limits of this machine, for benchmarks. Both calls keep `num_threads` cores busy until they return.
#pragma once
#include <cstdint>

#include "sage.h"

extern "C" {

enum { SAGE_RATE_BF16 = 0, SAGE_RATE_INT8 = 1, SAGE_RATE_F32 = 2 };

// Bytes read per second by all threads, the best of five rounds over `bytes` (rounded down to 4 MiB), more rounds
// until `seconds` have passed: widest loads, with and without software prefetch, whichever is faster.
// -1 if the memory cannot be had or an argument makes no sense.
SAGE_API double sage_read_bandwidth(int64_t bytes, int32_t num_threads, double seconds);

// Operations per second of the widest instruction for this kind of number, over tiles or registers (a multiply-add
// is two): the best of five rounds that take `seconds` together. -1 for an unknown kind, or if the system refuses tiles.
SAGE_API double sage_matrix_rate(int32_t kind, int32_t num_threads, double seconds);

}
