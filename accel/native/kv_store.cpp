// Writes keys and values into their blocks.
#include <immintrin.h>

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

// The scale makes the largest magnitude 127; a NaN in the row becomes the scale and so is not lost.
void store_int8(const float* x, int64_t head_dim, unsigned char* to, unsigned char* scale_to) {
  IntVec most = zero_ints();
  for (int64_t d = 0; d < head_dim; d += kLanes) most = max(most, magnitude_bits(load(x + d)));
  const int32_t bits = maximum(most);
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
  } else {
    store_int8(x, head_dim, to, scale_to);
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
