// Activations into the form that products take.
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear_layout.h"

namespace sage {
namespace linear {
namespace {

// One step of activations, at `to`; lanes past `count` become 0.
void put_floats(unsigned char* to, const float* x, int64_t count) {
  for (int64_t i = 0; i < 16; i += kLanes) {
    store(reinterpret_cast<float*>(to) + i, count > i ? load(x + i, count - i) : zero());
  }
}

void put_bf16(unsigned char* to, const float* x, int64_t count) {
#if defined(__AVX512BF16__)
  const __m512 low = load(x, count);
  const __m512 high = count > kLanes ? load(x + kLanes, count - kLanes) : zero();
  const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  std::memcpy(to, &both, 64);
#else
  put_floats(to, x, count);
#endif
}

// The largest size of a value, or NaN where one is not finite.
float largest_magnitude(const float* x, int64_t count) {
  IntVec most = zero_ints();
  for (int64_t i = 0; i < count; i += kLanes) most = max(most, magnitude_bits(load(x + i, count - i)));
  const int32_t bits = maximum(most);
  if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Below this a scale's inverse would overflow: such a group is zero.
constexpr float kSmallest = 1e-35f;

struct Quantizer {
  float scale, inverse;

  explicit Quantizer(float magnitude) : scale(magnitude / 127.0f), inverse(127.0f / magnitude) {
    if (!(magnitude >= kSmallest)) {
      inverse = 0.0f;
      if (magnitude < kSmallest) scale = 0.0f;  // otherwise NaN, which the scale carries into the product
    }
  }
};

// Writes kLanes values, the first of them `begin`.
void put_integers(unsigned char* to, int64_t begin, IntVec value, bool as_words) {
#if !defined(__AVX512F__)
  if (as_words) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
    words = _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + begin * 2), words);
    return;
  }
#else
  (void)as_words;
#endif
  store_bytes(reinterpret_cast<int8_t*>(to) + begin, value);
}

// Quantizes `count` values (at most one step of `step`), returns their sum.
int32_t put_integers(unsigned char* to, const float* x, int64_t count, int64_t step, bool as_words, const Quantizer& q) {
  IntVec total = zero_ints();
  for (int64_t i = 0; i < step; i += kLanes) {
    IntVec value = zero_ints();
    if (i < count && q.inverse > 0.0f) value = to_int(mul(load(x + i, count - i), all(q.inverse)));
    total = add(total, value);
    put_integers(to, i, value, as_words);
  }
  return sum(total);
}

void set_quantized_row(const InputLayout& layout, const Input& input, unsigned char* row, int64_t index, const float* x) {
  const Depth& depth = layout.depth;
  const Quantizer whole(input.has_one_scale ? largest_magnitude(x, depth.k) : 0.0f);
  auto* scales = reinterpret_cast<float*>(input.memory + layout.scales_at()) + index * depth.num_groups;
  auto* sums = reinterpret_cast<int32_t*>(input.memory + layout.sums_at()) + index * depth.num_groups;
  for (int64_t group = 0; group < depth.num_groups; ++group) {
    const float* from = x + depth.begin(group);
    const int64_t size = depth.size(group);
    const Quantizer quantizer = input.has_one_scale ? whole : Quantizer(largest_magnitude(from, size));
    int32_t total = 0;
    for (int64_t i = 0; i < depth.steps_per_group; ++i, row += layout.block_bytes()) {
      total += put_integers(row, from + i * depth.step, size - i * depth.step, depth.step, takes_words(input.kind), quantizer);
    }
    scales[group] = quantizer.scale;
    sums[group] = total;
  }
}

// The nearest multiple of 2^-9 below the least normal number, else the nearest number with three bits of fraction.
float nearest_e4m3(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits & 0x80000000u, size = bits & 0x7fffffffu;
  const uint32_t rounded = (size + 0x7ffffu + (size >> 20 & 1)) & 0xfff00000u;
  float magnitude, normal;
  std::memcpy(&magnitude, &size, 4);
  std::memcpy(&normal, &rounded, 4);
  const float small = (magnitude + 16384.0f) - 16384.0f;
  const float nearest = magnitude < 0.015625f ? small : normal;
  std::memcpy(&bits, &nearest, 4);
  bits |= sign;
  std::memcpy(&x, &bits, 4);
  return x;
}

void round_group(const Rounding& rounding, const float* x, int64_t count, float* out) {
  const bool is_int8 = rounding.code == Code::int8;
  const float limit = is_int8 ? 127.0f : 448.0f;
  const float scale = rounding.scale != 0.0f ? rounding.scale : largest_magnitude(x, count) / limit;
  if (scale == 0.0f) {
    std::memset(out, 0, static_cast<size_t>(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec divided = div(load(x + i, count - i), all(scale));
    const Vec bounded = is_int8 ? clamp(round(divided), -limit, limit) : clamp(divided, -limit, limit);
    if (count - i >= kLanes) {
      store(out + i, bounded);
    } else {
      store(out + i, bounded, count - i);
    }
  }
  if (!is_int8) {
    for (int64_t i = 0; i < count; ++i) out[i] = nearest_e4m3(out[i]);
  }
  for (int64_t i = 0; i < count; ++i) out[i] *= scale;
}

}  // namespace
}  // namespace linear

void round_row(const Rounding& rounding, const float* x, int64_t k, float* out) {
  const int64_t group = rounding.group > 0 ? rounding.group : k;
  for (int64_t begin = 0; begin < k; begin += group) {
    linear::round_group(rounding, x + begin, k - begin < group ? k - begin : group, out + begin);
  }
}

int64_t input_bytes(WeightKind kind, int64_t rows, int64_t k, int64_t group) {
  return linear::InputLayout(kind, rows, k, group).total_bytes();
}

void set_input_row(const Input& input, int64_t index, const float* x) {
  const linear::InputLayout layout(input);
  unsigned char* row = input.memory + index / layout.height * layout.row_group_bytes() +
                       index % layout.height * layout.depth.step_bytes;
  if (linear::is_quantized(input.kind)) {
    linear::set_quantized_row(layout, input, row, index, x);
    return;
  }
  const bool is_bf16 = linear::activation_bytes(input.kind) == 2;
  for (int64_t k = 0; k < input.k; k += layout.depth.step, row += layout.block_bytes()) {
    if (is_bf16) {
      linear::put_bf16(row, x + k, input.k - k);
    } else {
      linear::put_floats(row, x + k, input.k - k);
    }
  }
}

}  // namespace sage
