// What the attention kernels on AMX tiles share.
#pragma once
#include "attention_avx512.h"

namespace sage::attention_detail {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  void set(int first, int last, int64_t num_rows, int64_t num_bytes) {
    for (int tile = first; tile <= last; ++tile) {
      rows[tile] = static_cast<uint8_t>(num_rows);
      row_bytes[tile] = static_cast<uint16_t>(num_bytes);
    }
  }

  void load() const {
    // g++ takes the intrinsic to read 8 bytes only, and would drop what it does not see used.
    asm volatile("" : : "r"(this) : "memory");
    _tile_loadconfig(this);
  }
};

// g++ does not know that tile loads read memory: what was written before must be there.
inline void finish_writes() { asm volatile("" ::: "memory"); }

// The first tile of 16 queries from number `at` on of which one sees a token; `num_tiles`: none.
inline int64_t next_seen(const Queries& queries, const KVTile& tile, int64_t at, int64_t num_tiles) {
  for (; at < num_tiles; ++at) {
    for (int64_t i = at * 16; i < std::min(queries.count, at * 16 + 16); ++i) {
      if (queries.high[i] > tile.first + tile.begin && queries.low[i] < tile.first + tile.end) return at;
    }
  }
  return at;
}

}  // namespace sage::attention_detail
