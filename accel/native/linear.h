// Products with packed weights. One implementation per build: AMX, AVX-512 or AVX2.
#pragma once
#include <cstdint>

#include "team.h"

namespace sage {

// int8 has a scale for each output, int8_groups, int4 and int6 for each group of inputs.
enum class WeightKind : int32_t { bf16 = 0, int8 = 1, int4 = 2, f32 = 3, int8_groups = 4, int6 = 5 };

// What a code stands for: -8 ... 7 as a nibble plus 8, an integer, OCP's 8-bit and 4-bit floats, 0 ... 15.
enum class Code : int32_t { none = 0, int4 = 1, int8 = 2, e4m3 = 3, e5m2 = 4, e2m1 = 5, uint4 = 6 };

// How the numbers of a weight make its values: (number - zero) * scale - offset, by group. `code` is what a bf16 or f32
// weight is stored as that stays codes; integers, whose numbers are multiplied, have none.
struct Coding {
  Code code = Code::none;
  bool has_half_scales = false;  // in half floats
  bool has_zeros = false, has_offsets = false;
  bool is_unsigned = false;      // the numbers of int4 are 0 ... 15
  // Inputs that share a factor, a half float, of their scales, and one of their offsets; both are then bytes. 0: none.
  int64_t scale_group = 0;
};

// A matrix (n outputs, k inputs), packed once at load. The memory behind `data` and `bias` is the caller's.
// `is_gated`: the first n / 2 outputs are a gate and the others what it multiplies; they are packed side by
// side, panel by panel, and a product has n / 2 columns, silu(gate) * up.
struct Weight {
  WeightKind kind;
  bool is_gated;
  int64_t n, k;
  int64_t group;         // inputs per scale (a multiple of 32 in int4, of 16 in other integers and codes); 0: all
  unsigned char* data;   // 64-byte aligned, weight_bytes() long; scales and sums lie inside where a kernel wants them
  const float* bias;     // (n) or null
  Coding coding = {};
};

int64_t weight_bytes(const Weight&);

// Packs outputs [begin, begin + count); `stride` is in elements. Different outputs may be packed at once by
// different threads if `begin` and `count` are multiples of `pack_granularity()` (or reach the end).
int64_t pack_granularity();
void pack_bf16(const Weight&, int64_t begin, int64_t count, const uint16_t* rows, int64_t stride);
void pack_f32(const Weight&, int64_t begin, int64_t count, const float* rows, int64_t stride);
// number * scale; numbers in a byte each, of int4 -8 ... 7; scales (count, groups)
void pack_integers(const Weight&, int64_t begin, int64_t count, const int8_t* rows, int64_t stride, const float* scales);

// Some outputs of a weight as its checkpoint has it: codes a byte each, or two nibbles to a byte, the first in the low
// bits. Groups are counted in inputs; k is a multiple of 16.
struct CodedRows {
  const unsigned char* codes;      // (count, k or k / 2)
  const void* scales;              // (count, groups) float32, half floats or bytes as the weight's coding says
  const int8_t* zeros;             // (count, groups) or null
  const void* offsets;             // (count, groups) float32, or bytes where scales are; or null
  const uint16_t* factors;         // (count, scale groups) half floats, or null
  const uint16_t* offset_factors;  // the same of offsets
};
CodedRows rows_from(const Weight&, const CodedRows&, int64_t first);  // without the rows before `first`
void pack_codes(const Weight&, int64_t begin, int64_t count, const CodedRows&);
// One output as floats: what the packed weight stands for (embedding rows, tests).
void unpack_row(const Weight&, int64_t output, float* row);

// Activations in the form that products with weights of a kind want: rounded to bf16, or to 8 bits with a scale
// per row. `memory` is the caller's, 64-byte aligned, input_bytes() long.
struct Input {
  WeightKind kind;
  int64_t rows, k, group;
  unsigned char* memory;
  bool has_one_scale = false;  // of integers in groups: one scale per row instead of one per group
};

// What activations are rounded to and back before a product: int8 or e4m3, with one scale for `group` inputs (0: a row),
// their largest magnitude over 127 or 448; or with `scale`, if it is not 0.
struct Rounding {
  Code code;
  int64_t group;
  float scale;
};
void round_row(const Rounding&, const float* x, int64_t k, float* out);

int64_t input_bytes(WeightKind kind, int64_t rows, int64_t k, int64_t group);
// Different rows may be set by different threads.
void set_input_row(const Input&, int64_t row, const float* x);

enum class Into : int32_t { store = 0, add = 1 };  // out = product, or out += product

// out (rows, n or n / 2) float32, `stride` elements from row to row. Every member of the team calls it; it ends
// with a barrier. Each output of a row has the same bits whatever other rows there are.
void multiply(Team&, const Weight&, const Input&, Into, float* out, int64_t stride);

// The same for a gated weight, but as the input of the product that comes next (next.k is n / 2): what would be
// written, read and converted again is the largest of a step's activations. Only where `can_feed` says so.
bool can_feed(const Weight&, WeightKind next);
void multiply_into_input(Team&, const Weight&, const Input&, const Input& next);

}  // namespace sage
