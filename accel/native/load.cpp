#include "load.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "quantize.h"
#include "team.h"

namespace sage {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;  // of float32: small enough to be checked and packed in a core's cache


float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Rounds to the nearest, ties to even.
uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <typename Value>
Value value_at(const void* values, int64_t i) {
  Value value;
  std::memcpy(&value, static_cast<const char*>(values) + i * sizeof(Value), sizeof value);
  return value;
}

void widen(Stored stored, const void* values, int64_t begin, int64_t count, float* out) {
  if (stored == Stored::bf16) {
    for (int64_t i = 0; i < count; i++)
      out[i] = float_of(static_cast<uint32_t>(value_at<uint16_t>(values, begin + i)) << 16);
  } else if (stored == Stored::f16) {
    for (int64_t i = 0; i < count; i++) out[i] = _cvtsh_ss(value_at<uint16_t>(values, begin + i));
  } else if (stored == Stored::f32) {
    std::memcpy(out, static_cast<const float*>(values) + begin, count * sizeof(float));
  } else {
    for (int64_t i = 0; i < count; i++) out[i] = static_cast<float>(value_at<double>(values, begin + i));
  }
}

// NaN and infinity have all exponent bits set, and no finite value has.
bool all_finite(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, bits_of(values[i]) & 0x7FFFFFFFu);
  return largest < 0x7F800000u;
}

bool all_finite(const uint16_t* values, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max<uint16_t>(largest, values[i] & 0x7FFFu);
  return largest < 0x7F80u;
}

bool all_finite(const double* values, int64_t count) {
  bool is_finite = true;
  for (int64_t i = 0; i < count; i++) is_finite &= std::isfinite(values[i]);
  return is_finite;
}

// What is wrong with values that came out infinite or NaN as float32.
Finding cause(Stored stored, const void* values, int64_t begin, int64_t count) {
  if (stored == Stored::f64 && all_finite(static_cast<const double*>(values) + begin, count))
    return Finding::too_large;
  return Finding::not_finite;
}

// The worst finding of all members.
class Findings {
 public:
  void add(Finding finding) {
    int worst = worst_.load(std::memory_order_relaxed);
    while (worst < static_cast<int>(finding) &&
           !worst_.compare_exchange_weak(worst, static_cast<int>(finding), std::memory_order_relaxed)) {}
  }
  Finding worst() const { return static_cast<Finding>(worst_.load(std::memory_order_relaxed)); }

 private:
  std::atomic<int> worst_{0};
};

// Widens and checks some values; then rounds them to bf16 where that is wanted, and checks these too.
Finding take(Stored stored, const void* values, int64_t begin, int64_t count, float* wide, uint16_t* rounded) {
  widen(stored, values, begin, count, wide);
  if (!all_finite(wide, count)) return cause(stored, values, begin, count);
  if (rounded == nullptr) return Finding::ok;
  for (int64_t i = 0; i < count; i++) rounded[i] = to_bf16(wide[i]);
  return all_finite(rounded, count) ? Finding::ok : Finding::too_large;
}

// Runs body(first output of a piece, outputs) on all threads; pieces can be packed independently.
template <typename Body>
void share_rows(const Weight& weight, int64_t begin, int64_t count, int num_threads, const Body& body) {
  const int64_t granularity = pack_granularity();
  const int64_t grain = std::max<int64_t>(1, kPieceBytes / (4 * weight.k * granularity)) * granularity;
  // Pieces end at multiples of the grain, wherever `begin` lies; gates and what they multiply count apart.
  const int64_t origin = weight.is_gated && begin >= weight.n / 2 ? weight.n / 2 : 0;
  const int64_t first = (begin - origin) / grain, last = (begin - origin + count + grain - 1) / grain;
  run_team(num_threads, [&](Team& team) {
    team.share(last - first, 1, [&](int64_t from, int64_t to) {
      for (int64_t piece = first + from; piece < first + to; piece++) {
        const int64_t low = std::max(begin, origin + piece * grain);
        const int64_t high = std::min(begin + count, origin + (piece + 1) * grain);
        body(low, high - low);
      }
    });
  });
}

// The largest |weight / scale - code|, in steps.
float largest_error(const float* row, int64_t k, int64_t group, const int8_t* codes, const float* scales) {
  float worst = 0;
  for (int64_t begin = 0; begin < k; begin += group) {
    const float scale = scales[begin / group];
    for (int64_t i = begin; i < begin + group; i++)
      worst = std::max(worst, std::fabs(row[i] / scale - static_cast<float>(codes[i])));
  }
  return worst;
}

void raise(std::atomic<float>& largest, float value) {
  float seen = largest.load(std::memory_order_relaxed);
  while (seen < value && !largest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {}
}

}  // namespace

Finding pack_rows(const Weight& weight, int64_t begin, int64_t count, Stored stored, const void* rows,
                  int num_threads) {
  Findings findings;
  const bool is_aligned = reinterpret_cast<uintptr_t>(rows) % sizeof(uint16_t) == 0;
  share_rows(weight, begin, count, num_threads, [&](int64_t first, int64_t num_rows) {
    const int64_t size = num_rows * weight.k, from = (first - begin) * weight.k;
    if (weight.kind == WeightKind::bf16 && stored == Stored::bf16 && is_aligned) {  // as it is
      const uint16_t* values = static_cast<const uint16_t*>(rows) + from;
      if (!all_finite(values, size)) return findings.add(Finding::not_finite);
      return pack_bf16(weight, first, num_rows, values, weight.k);
    }
    std::vector<float> wide(size);
    std::vector<uint16_t> rounded(weight.kind == WeightKind::bf16 ? size : 0);
    const Finding finding = take(stored, rows, from, size, wide.data(), rounded.empty() ? nullptr : rounded.data());
    findings.add(finding);
    if (finding != Finding::ok) return;
    if (weight.kind == WeightKind::bf16) return pack_bf16(weight, first, num_rows, rounded.data(), weight.k);
    pack_f32(weight, first, num_rows, wide.data(), weight.k);
  });
  return findings.worst();
}

Finding quantize_rows(const Weight& weight, int64_t begin, int64_t count, Stored stored, const void* rows,
                      float clip_ratio, float* max_error, int num_threads, bool search_scales) {
  Findings findings;
  std::atomic<float> worst{*max_error};
  const int64_t k = weight.k, group = weight.kind == WeightKind::int4 ? weight.group : k, num_groups = k / group;
  share_rows(weight, begin, count, num_threads, [&](int64_t first, int64_t num_rows) {
    const int64_t size = num_rows * k;
    std::vector<float> wide(size), scales(num_rows * num_groups);
    std::vector<int8_t> codes(size);
    const Finding finding = take(stored, rows, (first - begin) * k, size, wide.data(), nullptr);
    findings.add(finding);
    if (finding != Finding::ok) return;
    for (int64_t row = 0; row < num_rows; row++) {
      const float* values = wide.data() + row * k;
      quantize_row(weight.kind, values, k, group, clip_ratio, search_scales, &codes[row * k], &scales[row * num_groups]);
      raise(worst, largest_error(values, k, group, &codes[row * k], &scales[row * num_groups]));
    }
    pack_integers(weight, first, num_rows, codes.data(), k, scales.data());
  });
  *max_error = worst.load(std::memory_order_relaxed);
  return findings.worst();
}

void pack_coded_rows(const Weight& weight, int64_t begin, int64_t count, const CodedRows& rows, int num_threads) {
  share_rows(weight, begin, count, num_threads, [&](int64_t first, int64_t num_rows) {
    pack_codes(weight, first, num_rows, rows_from(weight, rows, first - begin));
  });
}

Finding convert(Stored stored, const void* values, int64_t count, Stored target, void* out, int num_threads) {
  Findings findings;
  const int64_t grain = kPieceBytes / static_cast<int64_t>(sizeof(float));
  run_team(num_threads, [&](Team& team) {
    team.share(count, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> wide(std::min(grain, end - begin));
      for (int64_t i = begin; i < end; i += grain) {
        const int64_t size = std::min(grain, end - i);
        if (target == Stored::bf16) {
          findings.add(take(stored, values, i, size, wide.data(), static_cast<uint16_t*>(out) + i));
        } else {
          findings.add(take(stored, values, i, size, static_cast<float*>(out) + i, nullptr));
        }
      }
    });
  });
  return findings.worst();
}

}  // namespace sage
