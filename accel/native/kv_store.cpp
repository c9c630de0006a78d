// Writes keys and values into their blocks.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"

namespace sage {
namespace {

uint16_t as_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);  // to nearest even
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
    float largest = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) largest = std::max(largest, std::fabs(x[d]));
    const float scale = largest / 127.0f, per_unit = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) {
      const float unit = std::clamp(std::nearbyint(x[d] * per_unit), -127.0f, 127.0f);
      to[d] = static_cast<unsigned char>(static_cast<int8_t>(unit));
    }
    std::memcpy(scale_to, &scale, sizeof scale);
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
