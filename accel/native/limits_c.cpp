// What the machine can do at most, measured: what benchmarks hold their figures against.
#include <immintrin.h>

#include <chrono>

#include "team.h"

#define SAGE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

#if defined(__AVX512F__)
using Line = __m512i;
Line load_line(const unsigned char* at) { return _mm512_load_si512(at); }
Line mix(Line a, Line b) { return _mm512_xor_si512(a, b); }
constexpr int64_t kLine = 64;
#else
using Line = __m256i;
Line load_line(const unsigned char* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }
Line mix(Line a, Line b) { return _mm256_xor_si256(a, b); }
constexpr int64_t kLine = 32;
#endif

// Keeps a value that nothing else uses.
template <typename Value>
void keep(Value& value) {
  asm volatile("" : "+v"(value));
}

constexpr int64_t kPiece = 1 << 20, kAhead = 1024;

void read_piece(const unsigned char* from) {
  Line all[4] = {load_line(from), load_line(from + kLine), load_line(from + 2 * kLine), load_line(from + 3 * kLine)};
  for (int64_t i = 0; i < kPiece; i += 4 * kLine) {
    for (int64_t ahead = 0; ahead < 4 * kLine; ahead += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(from + i + ahead + kAhead), _MM_HINT_T0);
    }
    for (int64_t j = 0; j < 4; ++j) all[j] = mix(all[j], load_line(from + i + j * kLine));
  }
  for (Line& line : all) keep(line);
}

constexpr int64_t kRounds = 2'000'000;

// A loop of the widest product of the build over registers: operations of one round.
#if defined(__AMX_TILE__)
double multiply_registers(bool is_int8) {
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  _tile_loadconfig(&shapes);
  for (int64_t round = 0; round < kRounds / 8; ++round) {
    if (is_int8) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
  return 4.0 / 8 * (is_int8 ? 32768 : 16384);
}
#elif defined(__AVX512BF16__)
double multiply_registers(bool is_int8) {
  __m512i sums[16] = {}, a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
  for (int64_t round = 0; round < kRounds; ++round) {
#pragma GCC unroll 16
    for (__m512i& sum : sums) {
      if (is_int8) {
        asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
      } else {
        asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
      }
    }
  }
  for (__m512i& sum : sums) keep(sum);
  return 16.0 * (is_int8 ? 128 : 64);
}
#else
double multiply_registers(bool is_int8) {
  __m256i sums[12] = {}, a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
  for (int64_t round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (__m256i& sum : sums) {
      if (is_int8) {
        asm volatile("vpmaddubsw %1, %2, %%ymm15\n\tvpmaddwd %1, %%ymm15, %%ymm15\n\tvpaddd %%ymm15, %0, %0"
                     : "+x"(sum) : "x"(a), "x"(b) : "xmm15");
      } else {
        asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
      }
    }
  }
  for (__m256i& sum : sums) keep(sum);
  return 12.0 * (is_int8 ? 64 : 16);
}
#endif

}  // namespace

// Bytes per second that `num_threads` read from `memory` (64-byte aligned), once.
SAGE_EXPORT double sage_read_rate(const unsigned char* memory, int64_t bytes, int32_t num_threads) {
  const int64_t pieces = bytes / kPiece - 1;
  double rate = 0;
  sage::run_team(num_threads, [&](sage::Team& team) {
    team.barrier();
    const auto start = Clock::now();
    team.share(pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) read_piece(memory + i * kPiece);
    });
    if (team.rank() == 0) rate = static_cast<double>(pieces * kPiece) / seconds_since(start);
  });
  return rate;
}

// Operations per second of `num_threads`, two per multiplication and addition.
SAGE_EXPORT double sage_matrix_rate(int32_t is_int8, int32_t num_threads) {
  double rate = 0;
  sage::run_team(num_threads, [&](sage::Team& team) {
    team.barrier();
    const auto start = Clock::now();
    const double per_round = multiply_registers(is_int8 != 0);
    team.barrier();
    if (team.rank() == 0) rate = per_round * kRounds * team.size() / seconds_since(start);
  });
  return rate;
}
