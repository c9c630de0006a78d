// A C interface to products alone, for tests and benchmarks.
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "step.h"

#define SAGE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<unsigned char, Free>;

Memory allocate(int64_t bytes) {
  const int64_t alignment = bytes >= (4 << 20) ? (2 << 20) : 64;
  const auto rounded = static_cast<size_t>((bytes + alignment) / alignment * alignment);
  Memory memory(static_cast<unsigned char*>(std::aligned_alloc(static_cast<size_t>(alignment), rounded)));
  if (alignment > 64) madvise(memory.get(), rounded, MADV_HUGEPAGE);
  return memory;
}

}  // namespace

struct SagePacked {
  sage::Weight weight;
  Memory data;
  std::unique_ptr<float[]> bias;
};

namespace {

SagePacked* create(const sage::Weight& weight) {
  auto linear = std::make_unique<SagePacked>();
  const float* bias = weight.bias;
  const int64_t n = weight.n;
  linear->weight = weight;
  const int64_t num_bytes = sage::weight_bytes(linear->weight);
  linear->data = allocate(num_bytes);
  if (bias != nullptr) {
    linear->bias = std::make_unique<float[]>(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) linear->bias[static_cast<size_t>(i)] = bias[i];
  }
  linear->weight.data = linear->data.get();
  linear->weight.bias = linear->bias.get();
  return linear.release();
}

}  // namespace

// `bias` (n) or null. Freed by sage_linear_free.
SAGE_EXPORT SagePacked* sage_linear_create(int32_t kind, int32_t is_gated, int64_t n, int64_t k, int64_t group, const float* bias) {
  return create({static_cast<sage::WeightKind>(kind), is_gated != 0, n, k, group, nullptr, bias});
}

// The same of any weight. `data` is ignored, and the bias copied.
SAGE_EXPORT SagePacked* sage_linear_create_coded(const SageLinear* linear) { return create(sage::as_weight(*linear)); }

SAGE_EXPORT void sage_linear_pack_codes(SagePacked* linear, int64_t begin, int64_t count, const SageCodedRows* rows) {
  sage::pack_codes(linear->weight, begin, count, sage::as_rows(*rows));
}

SAGE_EXPORT void sage_linear_round_row(int32_t code, int64_t group, float scale, const float* x, int64_t k, float* out) {
  sage::round_row({static_cast<sage::Code>(code), group, scale}, x, k, out);
}

SAGE_EXPORT void sage_linear_free(SagePacked* linear) { delete linear; }

// Outputs [begin, begin + count) from `rows`, of the type of the kind; `scales` for int8 and int4.
SAGE_EXPORT void sage_linear_pack(SagePacked* linear, int64_t begin, int64_t count, const void* rows, int64_t stride,
                                  const float* scales) {
  const sage::Weight& w = linear->weight;
  switch (w.kind) {
    case sage::WeightKind::bf16: return sage::pack_bf16(w, begin, count, static_cast<const uint16_t*>(rows), stride);
    case sage::WeightKind::f32: return sage::pack_f32(w, begin, count, static_cast<const float*>(rows), stride);
    default: return sage::pack_integers(w, begin, count, static_cast<const int8_t*>(rows), stride, scales);
  }
}

SAGE_EXPORT int64_t sage_linear_bytes(const SagePacked* linear) {
  return sage::weight_bytes(linear->weight);
}

SAGE_EXPORT int64_t sage_linear_pack_granularity() { return sage::pack_granularity(); }

SAGE_EXPORT void sage_linear_unpack_row(const SagePacked* linear, int64_t output, float* row) {
  sage::unpack_row(linear->weight, output, row);
}

// Products with `num_calls` weights of one shape, one after the other in one team (a benchmark's cold weights): the
// same `x` (rows, k) each time, and `out` (rows, n or n / 2) float32. `seconds` (num_calls), or null: how long each
// took, activations included.
SAGE_EXPORT void sage_linear_multiply(SagePacked* const* linears, int64_t num_calls, const float* x, int64_t rows,
                                      int32_t into, float* out, int64_t stride, int32_t num_threads, double* seconds) {
  const sage::Weight& first = linears[0]->weight;
  const Memory memory = allocate(sage::input_bytes(first.kind, rows, first.k, first.group));
  const sage::Input input{first.kind, rows, first.k, first.group, memory.get()};
  sage::run_team(num_threads, [&](sage::Team& team) {
    for (int64_t call = 0; call < num_calls; ++call) {
      const auto start = std::chrono::steady_clock::now();
      team.share(rows, 8, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) sage::set_input_row(input, row, x + row * first.k);
      });
      sage::multiply(team, linears[call]->weight, input, static_cast<sage::Into>(into), out, stride);
      if (seconds != nullptr && team.rank() == 0) {
        seconds[call] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      }
    }
  });
}
