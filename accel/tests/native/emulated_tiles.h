// AMX tiles in memory, for CPUs that have none: included before every source, it makes them the variant `amx`.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

// What asks the kernel for the tiles gets 0, as from one that has them.
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield

namespace emulated {

struct Tile {
  int rows, bytes;
  alignas(64) unsigned char data[16][64];

  template <class T>
  T* row(int i) {
    return reinterpret_cast<T*>(data[i]);
  }
};

inline thread_local Tile tiles[8];

inline void configure(const void* config) {
  const auto* bytes = static_cast<const unsigned char*>(config);
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    tiles[i].bytes = row_bytes;
    tiles[i].rows = bytes[48 + i];
    std::memset(tiles[i].data, 0, sizeof tiles[i].data);
  }
}

inline void zero(int tile) { std::memset(tiles[tile].data, 0, sizeof tiles[tile].data); }

inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int i = 0; i < tiles[tile].rows; ++i) {
    std::memcpy(tiles[tile].data[i], static_cast<const unsigned char*>(from) + i * stride, tiles[tile].bytes);
  }
}

inline void store(int tile, void* to, int64_t stride) {
  for (int i = 0; i < tiles[tile].rows; ++i) {
    std::memcpy(static_cast<unsigned char*>(to) + i * stride, tiles[tile].data[i], tiles[tile].bytes);
  }
}

inline float wide(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline void multiply_bf16(int to, int a, int b) {
  for (int m = 0; m < tiles[to].rows; ++m) {
    for (int k = 0; k < tiles[a].bytes / 4; ++k) {
      const uint16_t* left = tiles[a].row<uint16_t>(m) + 2 * k;
      const uint16_t* right = tiles[b].row<uint16_t>(k);
      for (int n = 0; n < tiles[to].bytes / 4; ++n) {
        float& sum = tiles[to].row<float>(m)[n];
        sum += wide(left[0]) * wide(right[2 * n]);
        sum += wide(left[1]) * wide(right[2 * n + 1]);
      }
    }
  }
}

template <class Left>
inline void multiply_bytes(int to, int a, int b) {
  for (int m = 0; m < tiles[to].rows; ++m) {
    for (int k = 0; k < tiles[a].bytes / 4; ++k) {
      const Left* left = tiles[a].row<Left>(m) + 4 * k;
      const int8_t* right = tiles[b].row<int8_t>(k);
      for (int n = 0; n < tiles[to].bytes / 4; ++n) {
        int32_t sum = 0;
        for (int i = 0; i < 4; ++i) sum += left[i] * right[4 * n + i];
        tiles[to].row<int32_t>(m)[n] += sum;
      }
    }
  }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(config) emulated::configure(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(to, a, b) emulated::multiply_bf16(to, a, b)
#define _tile_dpbssd(to, a, b) emulated::multiply_bytes<int8_t>(to, a, b)
#define _tile_dpbusd(to, a, b) emulated::multiply_bytes<uint8_t>(to, a, b)
