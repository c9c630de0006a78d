// Activations into the form that products take.
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
  auto* scales = reinterpret_cast<float*>(input.memory + layout.scales_at()) + index * depth.num_groups;
  auto* sums = reinterpret_cast<int32_t*>(input.memory + layout.sums_at()) + index * depth.num_groups;
  for (int64_t group = 0; group < depth.num_groups; ++group) {
    const float* from = x + depth.begin(group);
    const int64_t size = depth.size(group);
    const Quantizer quantizer(largest_magnitude(from, size));
    int32_t total = 0;
    for (int64_t i = 0; i < depth.steps_per_group; ++i, row += layout.block_bytes()) {
      total += put_integers(row, from + i * depth.step, size - i * depth.step, depth.step, takes_words(input.kind), quantizer);
    }
    scales[group] = quantizer.scale;
    sums[group] = total;
  }
}

}  // namespace
}  // namespace linear

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
