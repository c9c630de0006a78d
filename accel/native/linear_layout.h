// Where packed weights and activations lie in memory. Shared by packing and by the kernels of a build.
//
// A panel is 2 * kLanes outputs (two vectors): of a gated weight kLanes gates and what they multiply. Along k the
// weights of an output come in quads of 4 bytes, which is what one dot-product instruction takes per lane:
//
//   quads    [k bytes / 4][half][lane][4 bytes]                    all kinds, except where there are tiles
//   tiles    [k bytes / 64][half][16 quads][lane][4 bytes]         bf16 and int8 with AMX
//   nibbles  [k / 8][half][lane][4 bytes], a byte holds k and k + 4   int4
//   sixes    [k / 16][half] two vectors of nibbles, and one of the high bits of their quads, two of each to a byte   int6
//
// Panels of integers are a run of groups, each followed by a set of what each output has there: its scale, and a zero
// and an offset if the weight has any; int8 has one group. Where a set is not a whole number of vectors and the groups
// are even in number, the sets of two follow the codes of both. Factors of scales and offsets come first in a panel.
// k is padded with zeros to 64 bytes of activations.
//
// Activations are [row group][k bytes / step][row][step bytes], so that the rows of a tile lie at a constant
// distance whatever k is. Quantized ones are followed by scales and by sums of the quantized values, (rows, groups).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "vectors.h"
#include "linear.h"

namespace sage::linear {

#if defined(__AMX_TILE__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr bool kHasDots = true;
#else
constexpr bool kHasDots = false;
#endif

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kHalfBytes = 4 * kLanes;   // one vector
constexpr int64_t kLineBytes = 2 * kHalfBytes;  // quads of a panel at one k
constexpr int64_t kTileBytes = 1024;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline bool is_quantized(WeightKind kind) {
  return kind == WeightKind::int8 || kind == WeightKind::int4 || kind == WeightKind::int8_groups || kind == WeightKind::int6;
}
inline bool has_groups(WeightKind kind) { return is_quantized(kind) && kind != WeightKind::int8; }
inline bool in_tiles(WeightKind kind) { return kHasTiles && (kind == WeightKind::bf16 || kind == WeightKind::int8); }

// With AVX2 alone int8 weights meet words: of each four activations the first, third, second and fourth.
inline bool takes_words(WeightKind kind) {
  return (kind == WeightKind::int8 || kind == WeightKind::int8_groups) && !kHasDots;
}

// Bytes of one activation. Without bf16 dot products, bf16 weights meet float32 activations.
inline int64_t activation_bytes(WeightKind kind) {
  if (is_quantized(kind)) return takes_words(kind) ? 2 : 1;
  return kind == WeightKind::bf16 && kHasDots ? 2 : 4;
}

// How k is cut into groups (a scale each) and steps (what one row holds contiguously).
struct Depth {
  int64_t k, group, num_groups;
  int64_t step, steps_per_group;  // step in activations
  int64_t step_bytes;

  Depth(WeightKind kind, int64_t num_inputs, int64_t group_size) : k(num_inputs) {
    step_bytes = 64;
    step = step_bytes / activation_bytes(kind);
    group = round_up(k, step);
    if (has_groups(kind) && group_size > 0 && group_size < k) {
      group = group_size;
      if (group % step != 0) step = kind == WeightKind::int4 || group % 32 == 0 ? 32 : 16;
      step_bytes = step * activation_bytes(kind);
    }
    num_groups = ceil_div(k, group);
    steps_per_group = ceil_div(group, step);
  }
  int64_t num_steps() const { return num_groups * steps_per_group; }
  int64_t begin(int64_t index) const { return index * group; }
  int64_t size(int64_t index) const { return begin(index) + group <= k ? group : k - begin(index); }
};

// Rows that a kernel takes at once; the rows of an input are spread evenly over as few groups as possible.
inline int64_t most_rows(WeightKind kind, int64_t rows) {
  if (kHasTiles && (in_tiles(kind) || (kind == WeightKind::int4 && rows > 8))) return 32;
  return kHasDots ? 8 : 6;
}

struct InputLayout {
  Depth depth;
  int64_t rows, height, num_row_groups;

  explicit InputLayout(const Input& x) : InputLayout(x.kind, x.rows, x.k, x.group) {}
  InputLayout(WeightKind kind, int64_t num_rows, int64_t k, int64_t group) : depth(kind, k, group), rows(num_rows) {
    num_row_groups = ceil_div(rows, most_rows(kind, rows));
    height = rows > 0 ? ceil_div(rows, num_row_groups) : 1;
  }
  int64_t block_bytes() const { return height * depth.step_bytes; }  // one step of a row group
  int64_t row_group_bytes() const { return depth.num_steps() * block_bytes(); }
  int64_t scales_at() const { return round_up(num_row_groups * row_group_bytes(), 64); }
  int64_t sums_at() const { return scales_at() + round_up(rows * depth.num_groups * 4, 64); }
  int64_t total_bytes() const { return sums_at() + round_up(rows * depth.num_groups * 4, 64); }
};

// What the outputs of a panel have for one group, one output after another: scales, zeros, offsets; and factors of
// these scales and offsets for a few groups together.
struct SetLayout {
  int64_t scale_bytes, offset_bytes;  // of one output
  int64_t zeros_at, offsets_at, num_bytes;
  int64_t factor_bytes;  // of one scale group
  int64_t factors_end;   // of a panel

  explicit SetLayout(const Weight& w) {
    const bool has_factors = w.coding.scale_group > 0;
    scale_bytes = has_factors ? 1 : w.coding.has_half_scales ? 2 : 4;
    offset_bytes = has_factors ? 1 : 4;
    zeros_at = kPanel * scale_bytes;
    offsets_at = zeros_at + (w.coding.has_zeros ? kPanel : 0);
    num_bytes = offsets_at + (w.coding.has_offsets ? kPanel * offset_bytes : 0);
    factor_bytes = has_factors ? 2 * kPanel * (w.coding.has_offsets ? 2 : 1) : 0;
    factors_end = has_factors ? round_up(w.k / w.coding.scale_group * factor_bytes, kHalfBytes) : 0;
  }
  Vec scales(const unsigned char* set, const unsigned char* factors, int64_t half) const {
    if (scale_bytes == 2) return load_f16(set + half * kLanes * 2);
    if (scale_bytes == 4) return load(reinterpret_cast<const float*>(set) + half * kLanes);
    return mul(load_int8(set + half * kLanes), load_f16(factors + half * kLanes * 2));
  }
  Vec offsets(const unsigned char* set, const unsigned char* factors, int64_t half) const {
    const unsigned char* from = set + offsets_at;
    if (offset_bytes == 4) return load(reinterpret_cast<const float*>(from) + half * kLanes);
    return mul(load_int8(from + half * kLanes), load_f16(factors + (kPanel + half * kLanes) * 2));
  }
};

struct PanelLayout {
  Depth depth;
  SetLayout sets;
  int64_t width;         // outputs of a panel in the product
  int64_t num_outputs;   // of the product
  int64_t num_panels;
  int64_t codes_bytes;   // of one group
  bool in_twos;          // the sets of two groups follow both
  int64_t unit_bytes;    // one or two groups and their sets
  int64_t groups_per_factor;  // 0: there are no factors
  int64_t panel_bytes;

  explicit PanelLayout(const Weight& w) : PanelLayout(w, w.is_gated) {}
  PanelLayout(const Weight& w, bool is_gated) : depth(w.kind, w.k, w.group), sets(w) {
    width = is_gated ? kLanes : kPanel;
    num_outputs = is_gated ? w.n / 2 : w.n;
    num_panels = ceil_div(num_outputs, width);
    codes_bytes = depth.steps_per_group * depth.step * kPanel * stored_bits(w.kind) / 8;
    const int64_t set_bytes = is_quantized(w.kind) ? sets.num_bytes : 0;
    in_twos = set_bytes % kHalfBytes != 0 && depth.num_groups % 2 == 0;
    unit_bytes = (1 + in_twos) * codes_bytes + round_up((1 + in_twos) * set_bytes, kHalfBytes);
    panel_bytes = sets.factors_end + depth.num_groups / (1 + in_twos) * unit_bytes;
    groups_per_factor = w.coding.scale_group > 0 ? w.coding.scale_group / depth.group : 0;
  }
  static int64_t stored_bits(WeightKind kind) {
    switch (kind) {
      case WeightKind::f32: return 32;
      case WeightKind::bf16: return 16;
      case WeightKind::int4: return 4;
      case WeightKind::int6: return 6;
      default: return 8;
    }
  }
  // Where things of a group lie in a panel.
  int64_t codes_at(int64_t group) const {
    return sets.factors_end + group / (1 + in_twos) * unit_bytes + group % (1 + in_twos) * codes_bytes;
  }
  int64_t set_at(int64_t group) const {
    return sets.factors_end + group / (1 + in_twos) * unit_bytes + (1 + in_twos) * codes_bytes +
           group % (1 + in_twos) * sets.num_bytes;
  }
  int64_t factors_at(int64_t group) const {
    return groups_per_factor > 0 ? group / groups_per_factor * sets.factor_bytes : 0;
  }
};

// The groups of a panel, one after another, where the layout has them. Computing the offsets of each from the layout took a
// fifth of a one-row product.
class GroupWalk {
 public:
  const unsigned char *codes, *set, *factors;

  GroupWalk(const PanelLayout& panels, const unsigned char* panel)
      : codes(panel + panels.sets.factors_end), set(panel + panels.set_at(0)), factors(panel), in_twos_(panels.in_twos),
        codes_bytes_(panels.codes_bytes), set_bytes_(panels.sets.num_bytes), unit_bytes_(panels.unit_bytes),
        factor_bytes_(panels.sets.factor_bytes), groups_per_factor_(panels.groups_per_factor), left_(groups_per_factor_) {}

  void next() {
    is_second_ = in_twos_ && !is_second_;
    codes += is_second_ ? codes_bytes_ : unit_bytes_ - (in_twos_ ? codes_bytes_ : 0);
    set += is_second_ ? set_bytes_ : unit_bytes_ - (in_twos_ ? set_bytes_ : 0);
    if (--left_ == 0) left_ = groups_per_factor_, factors += factor_bytes_;
  }

 private:
  const bool in_twos_;
  bool is_second_ = false;
  const int64_t codes_bytes_, set_bytes_, unit_bytes_, factor_bytes_;
  const int64_t groups_per_factor_;
  int64_t left_;
};

// What the outputs of a half of a panel have for one group, as a kernel adds it to their sums. Without `may_shift` there
// are neither zeros nor offsets.
template <bool may_shift = true>
struct GroupSet {
  bool has_zeros, has_offsets;
  Vec scale, offset;
  IntVec zero;

  GroupSet(const Weight& w, const SetLayout& sets, const unsigned char* set, const unsigned char* factors, int64_t half)
      : has_zeros(may_shift && w.coding.has_zeros), has_offsets(may_shift && w.coding.has_offsets) {
    scale = sets.scales(set, factors, half);
    if (has_zeros) zero = load_bytes(set + sets.zeros_at + half * kLanes);
    if (has_offsets) offset = sets.offsets(set, factors, half);
  }
  // `sum` and a group's exact product of a row, whose activations have `row_scale` and `row_sum`.
  Vec plus(Vec sum, IntVec product, float row_scale, int32_t row_sum) const {
    if (has_zeros) product = sub(product, mul(zero, all_ints(row_sum)));
    const Vec result = fma(mul(all(row_scale), scale), to_float(product), sum);
    if (!has_offsets) return result;
    return fma(all(-(row_scale * static_cast<float>(row_sum))), offset, result);
  }
};

// Where one output goes.
struct Column {
  int64_t panel, lane;
};

inline Column column_of(const Weight& w, const PanelLayout& panels, int64_t output) {
  const bool is_right = w.is_gated && output >= w.n / 2;
  const int64_t position = is_right ? output - w.n / 2 : output;
  return {position / panels.width, position % panels.width + (is_right ? kLanes : 0)};
}

// Memory of one thread, kept until it ends.
class Scratch {
 public:
  unsigned char* get(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64)))));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  std::unique_ptr<unsigned char, Free> memory_;
  int64_t size_ = 0;
};

// Byte of input `k` (within its group) of a panel's column.
inline int64_t quad_offset(int64_t k_byte, int64_t column) {
  return k_byte / 4 * kLineBytes + column * 4 + k_byte % 4;
}
inline int64_t tile_offset(int64_t k_byte, int64_t column) {
  return k_byte / 64 * (2 * kTileBytes) + column / 16 * kTileBytes + k_byte % 64 / 4 * 64 + column % 16 * 4 + k_byte % 4;
}
inline int64_t nibble_offset(int64_t k, int64_t column) { return k / 8 * kLineBytes + column * 4 + k % 4; }
// The first nibbles of 16 inputs in sixes.
inline int64_t six_offset(int64_t k, int64_t column) {
  return k / 16 * (3 * kLineBytes) + column / kLanes * (3 * kHalfBytes) + column % kLanes * 4;
}
// int4 and int6 are stored unsigned, as the number plus this.
inline int32_t excess_of(const Weight& w) { return w.kind == WeightKind::int6 ? 32 : w.coding.is_unsigned ? 0 : 8; }

// The input of the product that comes next.
struct Next {
  InputLayout layout;
  bool is_bf16;
  unsigned char* memory;

  explicit Next(const Input& x) : layout(x), is_bf16(activation_bytes(x.kind) == 2), memory(x.memory) {}
  // Where a row's values from a column on lie, to the end of their step.
  unsigned char* at(int64_t row, int64_t column) const {
    return memory + row / layout.height * layout.row_group_bytes() + column / layout.depth.step * layout.block_bytes() +
           row % layout.height * layout.depth.step_bytes + column % layout.depth.step * (is_bf16 ? 2 : 4);
  }
};

// Everything that a kernel needs to know of one product.
struct Product {
  const Weight& weight;
  PanelLayout panels;
  InputLayout input;
  const unsigned char* activations;
  const float* scales;   // (rows, groups)
  const int32_t* sums;   // (rows, groups)
  Into into;
  float* out;
  int64_t stride;
  const Next* next = nullptr;  // where the result goes instead of `out`
  const unsigned char* expanded = nullptr;  // the only panel that is multiplied, where the weight's own are codes

  Product(const Weight& w, const Input& x, Into how, float* result, int64_t result_stride)
      : weight(w), panels(w), input(x), activations(x.memory), into(how), out(result), stride(result_stride) {
    scales = reinterpret_cast<const float*>(x.memory + input.scales_at());
    sums = reinterpret_cast<const int32_t*>(x.memory + input.sums_at());
  }
  const unsigned char* panel(int64_t index) const {
    return expanded != nullptr ? expanded : weight.data + index * panels.panel_bytes;
  }
  const unsigned char* rows_at(int64_t row_group) const { return activations + row_group * input.row_group_bytes(); }
  int64_t first_row(int64_t row_group) const { return row_group * input.height; }
  int64_t num_rows(int64_t row_group) const {
    const int64_t left = input.rows - first_row(row_group);
    return left < input.height ? left : input.height;
  }
};

// Panels and row groups that one call of a kernel computes.
struct Part {
  int64_t panel_begin, panel_end, group_begin, group_end;
};

}  // namespace sage::linear
