// Products with AMX tiles: 2 x 2 tiles of 16 x 16 sums, up to 32 rows by one panel of 32 outputs.
//
// Up to 32 rows the weights are streamed once, fetched ahead by software; with more rows k is cut so that a block of a
// panel stays in L1 and one of activations in L2, and the sums of a panel rest in memory between blocks. Either way
// each sum is one chain over k, so that a row's bits do not depend on the number of rows. int4 with at most 8 rows goes
// to the AVX-512 kernel (linear.cpp): its sums are exact integers, scaled in the same order.
#pragma once
#include "linear_codes.h"
#include "linear_epilogue.h"

namespace sage::linear {

// Tile registers, which instructions name by number:
//   0 1   sums of rows 0 ... 15, left and right half of the panel     6   left half's weights
//   2 3   sums of rows 16 ... 31                                      7   right half's
//   4 5   activations of rows 0 ... 15 and 16 ... 31

constexpr int64_t kTileFloats = 256;
constexpr int64_t kSumFloats = 4 * kTileFloats;     // of one panel and row group
// How far the weight stream is fetched ahead, into L2. Farther, 32 rows took 15 % longer: requests that wait for memory
// then hold up those for activations.
constexpr int64_t kBytesAhead = 1024;
constexpr int64_t kNibblesAhead = 2048;             // the same of int4, into L1
// 16 KiB of a panel. Both blocks stream from L2 at 16 and more, which costs a quarter: measured 36 ns a step with 8,
// 38 with 10, 38 with 16 and 43 with 32, where k takes no rest.
constexpr int64_t kStepsInL1 = 8;
// k is cut for L2 only where it is long: at 32 steps, an input of 3,072 took 13 % longer than in one go.
constexpr int64_t kStepsInL2 = 96;
// Activations, beside which panels, sums and outputs pass through L2: 512 rows of 1,024. At 800 KiB and at 576 KiB
// products with 3,072 inputs take 10 % and 14 % longer.
constexpr int64_t kInputInL2 = 1152 << 10;
// Steps that k is cut into for L2, and row groups whose activations of so many steps stay there.
inline int64_t steps_in_l2(int64_t num_steps) { return ceil_div(num_steps, ceil_div(num_steps, kStepsInL2)); }
inline int64_t row_groups_in_l2(int64_t num_steps) { return kInputInL2 / (steps_in_l2(num_steps) * 2 * kTileBytes); }
constexpr int64_t kPanelsAtOnce = 8;                // whose sums rest in memory where k is cut

// Tiles for row groups of `height` rows and steps of `step_bytes`; released at the end of the scope.
class TileShapes {
 public:
  TileShapes(int64_t height, int64_t step_bytes) {
    const auto first = static_cast<uint8_t>(height < 16 ? height : 16);
    const auto second = static_cast<uint8_t>(height - first);
    const auto quads = static_cast<uint8_t>(step_bytes / 4);
    set(0, first, 64);
    set(1, first, 64);
    set(2, second, 64);
    set(3, second, 64);
    set(4, first, step_bytes);
    set(5, second, step_bytes);
    set(6, quads, 64);
    set(7, quads, 64);
    _tile_loadconfig(&shapes_);
  }
  ~TileShapes() { _tile_release(); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
  };
  void set(int tile, uint8_t rows, int64_t bytes) {
    shapes_.rows[tile] = rows;
    shapes_.bytes_per_row[tile] = static_cast<uint16_t>(rows > 0 ? bytes : 0);
  }
  Shapes shapes_;
};

template <_mm_hint level>
inline void fetch(const unsigned char* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(at + i), level);
}

// What tiles load must be in memory: the compiler does not know that these instructions read it.
inline void settle_memory() { asm volatile("" ::: "memory"); }

template <bool two>
inline void zero_sums() {
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool two>
inline void load_sums(const float* sums) {
  settle_memory();
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, sums + kTileFloats, 64);
  if constexpr (two) {
    _tile_loadd(2, sums + 2 * kTileFloats, 64);
    _tile_loadd(3, sums + 3 * kTileFloats, 64);
  }
}

template <bool two>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileFloats, 64);
  if constexpr (two) {
    _tile_stored(2, sums + 2 * kTileFloats, 64);
    _tile_stored(3, sums + 3 * kTileFloats, 64);
  }
  settle_memory();
}

// A macro, as tile registers are constants of the instruction.
#define SAGE_TILE_DOT(sum, rows, columns)    \
  do {                                       \
    if constexpr (kind == WeightKind::bf16)  \
      _tile_dpbf16ps(sum, rows, columns);    \
    else                                     \
      _tile_dpbssd(sum, rows, columns);      \
  } while (0)

// One step: all rows of a group times both halves of a panel. Loads stand between the products, which hide them.
template <WeightKind kind, bool two>
inline void tile_step(const unsigned char* rows, const unsigned char* weights, int64_t step_bytes) {
  _tile_loadd(6, weights, 64);
  _tile_loadd(4, rows, step_bytes);
  SAGE_TILE_DOT(0, 4, 6);
  _tile_loadd(7, weights + 16 * step_bytes, 64);
  SAGE_TILE_DOT(1, 4, 7);
  if constexpr (two) {
    _tile_loadd(5, rows + 16 * step_bytes, step_bytes);
    SAGE_TILE_DOT(2, 5, 6);
    SAGE_TILE_DOT(3, 5, 7);
  }
}
#undef SAGE_TILE_DOT

// Where the sums of a row's left half lie; the right half's come a tile later.
inline float* sums_of_row(float* sums, int64_t row) { return sums + row / 16 * 2 * kTileFloats + row % 16 * kLanes; }

// Integer sums of rows [begin, end) as floats.
inline void scale_rows(const Product& p, int64_t panel, int64_t row_group, int64_t begin, int64_t end, float* sums) {
  const unsigned char *at = p.panel(panel), *set = at + p.panels.set_at(0);
  const Vec left_scale = p.panels.sets.scales(set, at, 0), right_scale = p.panels.sets.scales(set, at, 1);
  for (int64_t row = begin; row < end; ++row) {
    float *left = sums_of_row(sums, row), *right = left + kTileFloats;
    const Vec scale = all(p.scales[p.first_row(row_group) + row]);
    store(left, mul(mul(scale, left_scale), to_float(load_ints(reinterpret_cast<int32_t*>(left)))));
    store(right, mul(mul(scale, right_scale), to_float(load_ints(reinterpret_cast<int32_t*>(right)))));
  }
}

// Complete sums of one panel and row group, whose rows are finished a few at a time between the steps of the next:
// the vector units then work while the tiles do.
template <WeightKind kind>
class Unfinished {
 public:
  explicit Unfinished(const Product& p) : p_(p) {}

  // Takes over `sums`, to be finished in `num_steps` calls of step().
  void take(int64_t panel, int64_t row_group, float* sums, int64_t num_steps) {
    panel_ = panel, row_group_ = row_group, sums_ = sums;
    row_ = 0, end_ = p_.num_rows(row_group);
    rows_per_step_ = ceil_div(p_.input.height, num_steps);
    fetch_outputs();
  }
  void step() {
    if (row_ < end_) finish_rows(row_ + rows_per_step_ < end_ ? row_ + rows_per_step_ : end_);
  }
  void finish_all() {
    if (row_ < end_) finish_rows(end_);
  }

 private:
  // The rows lie far apart: without this the stores wait for their lines.
  void fetch_outputs() const {
    if (p_.next != nullptr) return;
    const float* out = p_.out + p_.first_row(row_group_) * p_.stride + panel_ * p_.panels.width;
    for (int64_t row = 0; row < end_; ++row, out += p_.stride) fetch<_MM_HINT_T0>(reinterpret_cast<const unsigned char*>(out), 128);
  }
  void finish_rows(int64_t end) {
    if constexpr (kind == WeightKind::int8) scale_rows(p_, panel_, row_group_, row_, end, sums_);
    while (row_ < end) {
      const int64_t tile_end = (row_ / 16 + 1) * 16, stop = end < tile_end ? end : tile_end;
      const float* left = sums_of_row(sums_, row_);
      finish(p_, panel_, p_.first_row(row_group_) + row_, stop - row_, left, left + kTileFloats);
      row_ = stop;
    }
  }

  const Product& p_;
  int64_t panel_ = 0, row_group_ = 0, row_ = 0, end_ = 0, rows_per_step_ = 1;
  float* sums_ = nullptr;
};

// One row group: the weights go by once. Codes are expanded a step, which is a block of bf16, ahead of its product:
// tiles cannot be loaded from stores that have not ended.
template <WeightKind kind, bool two>
void stream_panels(const Product& p, const Part& part, const Expander* expander) {
  const TileShapes shapes(p.input.height, 64);
  alignas(64) float sums[2][kSumFloats];
  alignas(64) unsigned char block_of_codes[2][2 * kTileBytes];
  Unfinished<kind> before(p);
  const int64_t num_steps = p.input.depth.num_steps(), block = p.input.block_bytes();
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    const unsigned char* weights = expander == nullptr ? p.panel(panel) : expander->panel(panel);
    const unsigned char* rows = p.rows_at(part.group_begin);
    zero_sums<two>();
    if (expander != nullptr) expander->block(weights, 0, block_of_codes[0]);
    for (int64_t step = 0; step < num_steps; ++step, rows += block) {
      if (expander == nullptr) {
        fetch<_MM_HINT_T1>(weights + kBytesAhead, 2 * kTileBytes);
        tile_step<kind, two>(rows, weights, 64);
        weights += 2 * kTileBytes;
      } else {
        if (step + 1 < num_steps) expander->block(weights, step + 1, block_of_codes[(step + 1) % 2]);
        settle_memory();
        tile_step<kind, two>(rows, block_of_codes[step % 2], 64);
      }
      before.step();
    }
    before.finish_all();
    store_sums<two>(sums[panel % 2]);
    before.take(panel, part.group_begin, sums[panel % 2], num_steps);
  }
  before.finish_all();
}

// Steps [begin, end) of one panel for all row groups of the part; meanwhile the block `ahead` is fetched into L2.
template <WeightKind kind, bool two>
void block_of_panel(const Product& p, const Part& part, int64_t panel, int64_t begin, int64_t end,
                    const unsigned char* ahead, float* sums) {
  const int64_t block = p.input.block_bytes(), num_steps = end - begin;
  const bool is_last = end == p.input.depth.num_steps();
  const unsigned char* weights = p.panel(panel) + begin * 2 * kTileBytes;
  const unsigned char* ahead_end = ahead + kStepsInL1 * 2 * kTileBytes;
  const int64_t lines = ceil_div(kStepsInL1 * 32, (part.group_end - part.group_begin) * num_steps);
  Unfinished<kind> before(p);
  for (int64_t group = part.group_begin; group < part.group_end; ++group, sums += kSumFloats) {
    const unsigned char* rows = p.rows_at(group) + begin * block;
    if (begin == 0) {
      zero_sums<two>();
    } else {
      load_sums<two>(sums);
    }
    for (int64_t step = 0; step < num_steps; ++step, rows += block) {
      tile_step<kind, two>(rows, weights + step * 2 * kTileBytes, 64);
      for (int64_t i = 0; i < lines && ahead < ahead_end; ++i, ahead += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      }
      before.step();
    }
    before.finish_all();
    store_sums<two>(sums);
    if (is_last) before.take(panel, group, sums, num_steps);
  }
  before.finish_all();
}

template <WeightKind kind, bool two>
void block_panels(const Product& p, const Part& part) {
  static thread_local Scratch scratch;
  const TileShapes shapes(p.input.height, 64);
  const int64_t num_steps = p.input.depth.num_steps(), cut = steps_in_l2(num_steps);
  const int64_t panel_floats = (part.group_end - part.group_begin) * kSumFloats;
  // Where k is not cut for L2, one panel's sums suffice.
  const int64_t num_panels = part.panel_end - part.panel_begin, num_sums = cut < num_steps ? num_panels : 1;
  auto* sums = reinterpret_cast<float*>(scratch.get(num_sums * panel_floats * 4));
  for (int64_t outer = 0; outer < num_steps; outer += cut) {
    const int64_t outer_end = outer + cut < num_steps ? outer + cut : num_steps;
    for (int64_t i = 0; i < num_panels; ++i) {
      const int64_t panel = part.panel_begin + i;
      for (int64_t begin = outer; begin < outer_end; begin += kStepsInL1) {
        const int64_t end = begin + kStepsInL1 < outer_end ? begin + kStepsInL1 : outer_end;
        const unsigned char* ahead = end < outer_end ? p.panel(panel) + end * 2 * kTileBytes
                                                     : p.panel(panel + 1) + outer * 2 * kTileBytes;
        block_of_panel<kind, two>(p, part, panel, begin, end, ahead, sums + i % num_sums * panel_floats);
      }
    }
  }
}

// A group of int4 weights as int8 tiles.
inline void unpack_group(const unsigned char* nibbles, const Depth& depth, int32_t excess, unsigned char* tiles) {
  const __m512i low_bits = _mm512_set1_epi8(15), excesses = _mm512_set1_epi8(static_cast<char>(excess));
  const int64_t tile = 16 * depth.step_bytes;
  for (int64_t step = 0; step < depth.steps_per_group; ++step, tiles += 2 * tile) {
    for (int64_t quad = 0; quad < depth.step_bytes / 4; quad += 2, nibbles += kLineBytes) {
      fetch<_MM_HINT_T0>(nibbles + kNibblesAhead, kLineBytes);
      for (int64_t half = 0; half < 2; ++half) {
        const __m512i both = _mm512_load_si512(nibbles + half * kHalfBytes);
        unsigned char* to = tiles + half * tile + quad * 64;
        _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(both, low_bits), excesses));
        _mm512_store_si512(to + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits), excesses));
      }
    }
  }
}

// Adds one group's products, scaled, to the float sums of one panel and row group.
template <bool two>
void add_group(const Product& p, const unsigned char* tiles, const GroupWalk& place, int64_t row_group, int64_t group,
               float* sums) {
  alignas(64) float exact[kSumFloats];
  const Depth& depth = p.input.depth;
  const unsigned char* rows = p.rows_at(row_group) + group * depth.steps_per_group * p.input.block_bytes();
  zero_sums<two>();
  for (int64_t step = 0; step < depth.steps_per_group; ++step, rows += p.input.block_bytes()) {
    tile_step<WeightKind::int4, two>(rows, tiles + step * 32 * depth.step_bytes, depth.step_bytes);
  }
  store_sums<two>(exact);
  const SetLayout& layout = p.panels.sets;
  const GroupSet<> sets[2] = {{p.weight, layout, place.set, place.factors, 0}, {p.weight, layout, place.set, place.factors, 1}};
  const int64_t first = p.first_row(row_group), count = p.num_rows(row_group);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t index = (first + row) * depth.num_groups + group;
    for (int64_t half = 0; half < 2; ++half) {
      float* to = sums_of_row(sums, row) + half * kTileFloats;
      const IntVec product = load_ints(reinterpret_cast<int32_t*>(sums_of_row(exact, row) + half * kTileFloats));
      store(to, sets[half].plus(group == 0 ? zero() : load(to), product, p.scales[index], p.sums[index]));
    }
  }
}

template <bool two>
void int4_panels(const Product& p, const Part& part) {
  static thread_local Scratch scratch;
  const Depth& depth = p.input.depth;
  const TileShapes shapes(p.input.height, depth.step_bytes);
  const int64_t group_bytes = depth.steps_per_group * depth.step_bytes * kPanel;
  const int64_t sum_bytes = (part.group_end - part.group_begin) * kSumFloats * 4;
  auto* sums = reinterpret_cast<float*>(scratch.get(sum_bytes + group_bytes));
  unsigned char* tiles = reinterpret_cast<unsigned char*>(sums) + sum_bytes;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    GroupWalk place(p.panels, p.panel(panel));
    for (int64_t group = 0; group < depth.num_groups; ++group, place.next()) {
      unpack_group(place.codes, depth, excess_of(p.weight), tiles);
      float* here = sums;
      for (int64_t rows = part.group_begin; rows < part.group_end; ++rows, here += kSumFloats) {
        add_group<two>(p, tiles, place, rows, group, here);
        if (group + 1 < depth.num_groups) continue;
        Unfinished<WeightKind::int4> done(p);
        done.take(panel, rows, here, 1);
        done.finish_all();
      }
    }
  }
}

template <bool two>
void multiply_tiles_of(const Product& p, const Part& part, const Expander* expander) {
  const bool is_bf16 = p.weight.kind == WeightKind::bf16;
  if (p.weight.kind == WeightKind::int4) {
    int4_panels<two>(p, part);
  } else if (p.input.num_row_groups == 1) {
    is_bf16 ? stream_panels<WeightKind::bf16, two>(p, part, expander)
            : stream_panels<WeightKind::int8, two>(p, part, nullptr);
  } else {
    is_bf16 ? block_panels<WeightKind::bf16, two>(p, part) : block_panels<WeightKind::int8, two>(p, part);
  }
}

// With an expander there is one row group, whose panels it expands as they are multiplied.
inline void multiply_tiles(const Product& p, const Part& part, const Expander* expander = nullptr) {
  p.input.height > 16 ? multiply_tiles_of<true>(p, part, expander) : multiply_tiles_of<false>(p, part, expander);
}

}  // namespace sage::linear
