// What this machine can do at most: how fast all threads read memory, and how fast they multiply numbers that they
// hold already. Benchmarks compare their figures with both, measured in the same run.
#include "limits.h"

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int kNumRounds = 5;
constexpr int64_t kPiece = int64_t{4} << 20;  // bytes taken at a time: a thread that is held up leaves the rest
constexpr int64_t kAhead = 1024;              // bytes from a load to its prefetch; best on Sapphire Rapids
constexpr int64_t kLine = 64;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs body(thread) on so many threads that start together; returns the seconds from the start to the last end.
double run_together(int num_threads, const std::function<void(int)>& body) {
  std::atomic<int> num_ready{0};
  std::atomic<bool> is_open{false};
  auto wait_and_run = [&](int thread) {
    num_ready.fetch_add(1);
    while (!is_open.load(std::memory_order_acquire)) std::this_thread::yield();
    body(thread);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < num_threads; ++thread) others.emplace_back(wait_and_run, thread);
  while (num_ready.load() < num_threads - 1) std::this_thread::yield();
  const double start = now_s();
  is_open.store(true, std::memory_order_release);
  body(0);
  for (auto& other : others) other.join();
  return now_s() - start;
}

// Reads `bytes`, a multiple of four lines, in two streams. The halves are read side by side, so that more rows of
// memory are open at once.
template <bool prefetches>
void read_piece(const unsigned char* data, int64_t bytes) {
  const unsigned char* low = data;
  const unsigned char* high = data + bytes / 2;
#if defined(__AVX512F__)
  __m512i sum = _mm512_setzero_si512();
  for (int64_t at = 0; at < bytes / 2; at += 2 * kLine) {
    if (prefetches) {
      for (int64_t line = 0; line < 2; ++line) {
        _mm_prefetch(reinterpret_cast<const char*>(low + at + kAhead + line * kLine), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(high + at + kAhead + line * kLine), _MM_HINT_T0);
      }
    }
    const __m512i one = _mm512_xor_si512(_mm512_load_si512(low + at), _mm512_load_si512(low + at + kLine));
    const __m512i two = _mm512_xor_si512(_mm512_load_si512(high + at), _mm512_load_si512(high + at + kLine));
    sum = _mm512_xor_si512(sum, _mm512_xor_si512(one, two));
  }
  asm volatile("" ::"v"(sum));  // the loads must not be optimized away
#else
  auto load = [](const unsigned char* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); };
  __m256i sum = _mm256_setzero_si256();
  for (int64_t at = 0; at < bytes / 2; at += kLine) {
    if (prefetches) {
      _mm_prefetch(reinterpret_cast<const char*>(low + at + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(high + at + kAhead), _MM_HINT_T0);
    }
    const __m256i one = _mm256_xor_si256(load(low + at), load(low + at + kLine / 2));
    const __m256i two = _mm256_xor_si256(load(high + at), load(high + at + kLine / 2));
    sum = _mm256_xor_si256(sum, _mm256_xor_si256(one, two));
  }
  asm volatile("" ::"x"(sum));
#endif
}

// Memory of whole pieces in huge pages where the system gives them, each touched by the thread that took it.
class Buffer {
 public:
  Buffer(int64_t bytes, int num_threads) : bytes_(bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    madvise(memory, bytes, MADV_HUGEPAGE);
    data_ = static_cast<unsigned char*>(memory);
    run_pieces(num_threads, [](unsigned char* piece) { std::memset(piece, 1, kPiece); });
  }
  ~Buffer() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool is_valid() const { return data_ != nullptr; }

  // Calls body once per piece, from whichever thread is free; returns the seconds that it took.
  double run_pieces(int num_threads, const std::function<void(unsigned char*)>& body) {
    std::atomic<int64_t> next{0};
    return run_together(num_threads, [&](int) {
      for (int64_t at; (at = next.fetch_add(kPiece)) < bytes_;) body(data_ + at);
    });
  }

 private:
  int64_t bytes_;
  unsigned char* data_ = nullptr;
};

// Multiplies numbers in registers so many times; returns the operations done (a multiply-add is two).
using Multiply = double (*)(int64_t num_times);

// Twelve sums hide the latency of an instruction on both ports. `asm` keeps each in its register: compilers of 2022
// spill the sums of dp intrinsics.
#define SAGE_TWELVE(one) \
  one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8) one(9) one(10) one(11)

double multiply_f32(int64_t num_times) {
#if defined(__AVX512F__)
  const __m512 ones = _mm512_setzero_ps();
#define SAGE_DECLARE(i) __m512 sum##i = _mm512_setzero_ps();
#else
  const __m256 ones = _mm256_setzero_ps();
#define SAGE_DECLARE(i) __m256 sum##i = _mm256_setzero_ps();
#endif
#define SAGE_MULTIPLY(i) asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sum##i) : "v"(ones));
  SAGE_TWELVE(SAGE_DECLARE)
  for (int64_t i = 0; i < num_times; ++i) {
    SAGE_TWELVE(SAGE_MULTIPLY)
  }
#undef SAGE_DECLARE
#undef SAGE_MULTIPLY
  return static_cast<double>(num_times) * 12 * (2 * sizeof(ones) / sizeof(float));
}

#if defined(__AMX_TILE__)

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl's numbers; once for the process
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void set_tiles() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = 16;
  }
  asm volatile("" ::: "memory");  // GCC's intrinsic says that it reads 8 bytes, and drops stores to the others
  _tile_loadconfig(&shapes);
  alignas(64) static const unsigned char zeros[1024] = {};
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
}

double multiply_bf16(int64_t num_times) {
  set_tiles();
  for (int64_t i = 0; i < num_times; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return static_cast<double>(num_times) * 4 * (2 * 16 * 16 * 32);
}

double multiply_int8(int64_t num_times) {
  set_tiles();
  for (int64_t i = 0; i < num_times; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return static_cast<double>(num_times) * 4 * (2 * 16 * 16 * 64);
}

#elif defined(__AVX512BF16__)

bool may_use_tiles() { return true; }

double multiply_bf16(int64_t num_times) {
  const __m512i ones = _mm512_setzero_si512();
#define SAGE_DECLARE(i) __m512 sum##i = _mm512_setzero_ps();
#define SAGE_MULTIPLY(i) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum##i) : "v"(ones));
  SAGE_TWELVE(SAGE_DECLARE)
  for (int64_t i = 0; i < num_times; ++i) {
    SAGE_TWELVE(SAGE_MULTIPLY)
  }
#undef SAGE_DECLARE
#undef SAGE_MULTIPLY
  return static_cast<double>(num_times) * 12 * (2 * 32);
}

double multiply_int8(int64_t num_times) {
  const __m512i ones = _mm512_setzero_si512();
#define SAGE_DECLARE(i) __m512i sum##i = _mm512_setzero_si512();
#define SAGE_MULTIPLY(i) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum##i) : "v"(ones));
  SAGE_TWELVE(SAGE_DECLARE)
  for (int64_t i = 0; i < num_times; ++i) {
    SAGE_TWELVE(SAGE_MULTIPLY)
  }
#undef SAGE_DECLARE
#undef SAGE_MULTIPLY
  return static_cast<double>(num_times) * 12 * (2 * 64);
}

#else

bool may_use_tiles() { return true; }

// Without bf16 instructions, products of bf16 run as float32.
constexpr Multiply multiply_bf16 = multiply_f32;

// Bytes in pairs to 16 bits, pairs of these to 32, and a sum.
double multiply_int8(int64_t num_times) {
  const __m256i ones = _mm256_setzero_si256();
  __m256i product = ones;
#define SAGE_DECLARE(i) __m256i sum##i = _mm256_setzero_si256();
#define SAGE_MULTIPLY(i)                                                                   \
  asm volatile("vpmaddubsw %2, %2, %1\n\tvpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0"         \
               : "+x"(sum##i), "+x"(product)                                               \
               : "x"(ones));
  SAGE_TWELVE(SAGE_DECLARE)
  for (int64_t i = 0; i < num_times; ++i) {
    SAGE_TWELVE(SAGE_MULTIPLY)
  }
#undef SAGE_DECLARE
#undef SAGE_MULTIPLY
  return static_cast<double>(num_times) * 12 * (2 * 32);
}

#endif

#undef SAGE_TWELVE

Multiply multiply_of(int32_t kind) {
  if (kind == SAGE_RATE_BF16) return multiply_bf16;
  if (kind == SAGE_RATE_F32) return multiply_f32;
  return kind == SAGE_RATE_INT8 ? multiply_int8 : nullptr;
}

}  // namespace

extern "C" double sage_read_bandwidth(int64_t bytes, int32_t num_threads, double seconds) {
  if (bytes < kPiece || num_threads < 1) return -1;
  const int64_t num_read = bytes / kPiece * kPiece;
  Buffer buffer(num_read, num_threads);
  if (!buffer.is_valid()) return -1;
  double best_s = 1e300;
  const double until = now_s() + seconds;
  for (int round = 0; round < kNumRounds || now_s() < until; ++round) {
    best_s = std::min(best_s, buffer.run_pieces(num_threads, [](unsigned char* piece) {
      read_piece<true>(piece, kPiece);
    }));
    best_s = std::min(best_s, buffer.run_pieces(num_threads, [](unsigned char* piece) {
      read_piece<false>(piece, kPiece);  // Zen 4 reads as fast without
    }));
  }
  return static_cast<double>(num_read) / best_s;
}

extern "C" double sage_matrix_rate(int32_t kind, int32_t num_threads, double seconds) {
  const Multiply multiply = multiply_of(kind);
  if (multiply == nullptr || num_threads < 1 || !may_use_tiles()) return -1;
  // As many times as fill a fifth of the time, found by one thread that also warms up the clock.
  int64_t num_times = 1000;
  double took_s = 0;
  while (took_s < std::min(0.01, seconds / kNumRounds)) {
    num_times *= 2;
    const double start = now_s();
    multiply(num_times);
    took_s = now_s() - start;
  }
  num_times = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(num_times) * seconds / kNumRounds / took_s));
  double best = 0;
  for (int round = 0; round < kNumRounds; ++round) {
    std::vector<double> done(num_threads, 0.0);
    const double round_s = run_together(num_threads, [&](int thread) { done[thread] = multiply(num_times); });
    double total = 0;
    for (double each : done) total += each;
    best = std::max(best, total / round_s);
  }
  return best;
}
