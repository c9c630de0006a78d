// Writes keys and values into their blocks.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "vectors.h"

namespace sage {
namespace {

uint16_t as_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);  // to nearest even
}

// The bits of the largest magnitude of a row. Those of NaN are larger than all others.
int32_t largest(const float* x, int64_t head_dim) {
  IntVec most = zero_ints();
  for (int64_t d = 0; d < head_dim; d += kLanes) most = max(most, magnitude_bits(load(x + d)));
  return maximum(most);
}

// The scale makes the largest magnitude 127; a NaN in the row becomes the scale and so is not lost.
void store_int8(const float* x, int64_t head_dim, unsigned char* to, unsigned char* scale_to) {
  const int32_t bits = largest(x, head_dim);
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  const float scale = magnitude / 127.0f;
  const Vec per_unit = all(magnitude > 0.0f ? 127.0f / magnitude : 0.0f);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    // Cut before it becomes an integer: the inverse of a tiny magnitude is infinite.
    const Vec units = clamp(mul(load(x + d), per_unit), -127.0f, 127.0f);
    store_bytes(reinterpret_cast<int8_t*>(to) + d, to_int(units));
  }
  std::memcpy(scale_to, &scale, sizeof scale);
}

// The nearest E4M3 number, at ties the one with an even mantissa; magnitudes are at most 448. Denormals, below 2^-6, are
// left out, since adding to an exponent does not widen them: what is smaller becomes 2^-6 or 0.
unsigned char as_e4m3(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t size = bits & 0x7fffffffu, rounded = (size + 0x7ffffu + (size >> 20 & 1u)) >> 20;
  const uint32_t small = size > 0x3c000000u ? 8u : 0u;  // 2^-7
  return static_cast<unsigned char>((bits >> 24 & 0x80u) | (size < 0x3c800000u ? small : rounded - (120u << 3)));
}

// The scale is the power of two that brings the largest magnitude above 224 and to at most 448. NaN and infinity in a row
// make all of it NaN.
void store_fp8(const float* x, int64_t head_dim, unsigned char* to, unsigned char* scale_to) {
  const uint32_t bits = static_cast<uint32_t>(largest(x, head_dim));
  const bool is_finite = bits < 0x7f800000u;
  // Its exponent: one more where the mantissa is above that of 448. At least 2^-113, far from where bf16 becomes denormal.
  const uint32_t exponent = std::max((bits + 0x1fffffu) >> 23, 22u) - 8u;
  const uint32_t scale = is_finite ? exponent << 23 : 0x7fc00000u, inverse = (254u - exponent) << 23;
  float per_unit;
  std::memcpy(&per_unit, &inverse, sizeof per_unit);
  for (int64_t d = 0; d < head_dim; ++d) to[d] = is_finite ? as_e4m3(x[d] * per_unit) : 0x7f;
  std::memcpy(scale_to, &scale, sizeof scale);
}

void store_row(KVKind kind, const float* x, int64_t head_dim, unsigned char* to, unsigned char* scale_to) {
  if (kind == KVKind::f32) {
    std::memcpy(to, x, static_cast<size_t>(head_dim) * sizeof(float));
  } else if (kind == KVKind::bf16) {
    uint16_t* row = reinterpret_cast<uint16_t*>(to);
    for (int64_t d = 0; d < head_dim; ++d) row[d] = as_bf16(x[d]);
  } else if (kind == KVKind::f16) {
    for (int64_t d = 0; d < head_dim; d += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + d), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d * 2), halves);
    }
  } else if (kind == KVKind::int8) {
    store_int8(x, head_dim, to, scale_to);
  } else {
    store_fp8(x, head_dim, to, scale_to);
  }
}

}  // namespace

void store_kv(const KV& kv, int64_t layer, int64_t kv_head, int64_t head_dim, int64_t slot, const float* key,
              const float* value) {
  const int64_t offset = slot % kv.block_size;
  unsigned char* block = kv.base + slot / kv.block_size * kv.block;
  unsigned char* row = block + layer * kv.layer + kv_head * kv.head + offset * kv.token;
  unsigned char* scale = block + kv.scales + layer * kv.layer_scales + kv_head * kv.head_scales + offset * 4;
  store_row(kv.kind, key, head_dim, row, scale);
  store_row(kv.kind, value, head_dim, row + kv.kv, scale + kv.kv_scales);
}

}  // namespace sage
