// Attention over plain pointers, for tests and benchmarks.
#include "attention.h"

#include <algorithm>

#define SAGE_EXPORT extern "C" __attribute__((visibility("default")))

using namespace sage;

SAGE_EXPORT int64_t sage_attention_scratch_bytes(const AttentionShape* shape, const KV* kv, const AttentionRows* seqs,
                                                 int64_t num_seqs, int32_t num_threads) {
  return attention_scratch_bytes(*shape, *kv, seqs, num_seqs, num_threads);
}

// Layers [layer, layer + num_layers), one after another. `scratch`: 64-byte aligned.
SAGE_EXPORT void sage_attend(const AttentionShape* shape, const KV* kv, int64_t layer, int64_t num_layers,
                             const AttentionRows* seqs, int64_t num_seqs, int64_t shared_blocks, const float* query,
                             float* out, unsigned char* scratch, int32_t num_threads) {
  run_team(num_threads, [&](Team& team) {
    for (int64_t l = layer; l < layer + num_layers; ++l) {
      attend(team, *shape, *kv, l, seqs, num_seqs, shared_blocks, query, shape->num_heads * shape->head_dim, out, scratch);
    }
  });
}

// keys, values: (tokens, kv_heads, head_dim); slots: (tokens)
SAGE_EXPORT void sage_store_kv(const KV* kv, int64_t layer, int64_t num_kv_heads, int64_t head_dim,
                               int64_t num_tokens, const int64_t* slots, const float* keys, const float* values) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < num_kv_heads; ++h) {
      const int64_t at = (t * num_kv_heads + h) * head_dim;
      store_kv(*kv, layer, h, head_dim, slots[t], keys + at, values + at);
    }
  }
}

// Reorders `seqs` and writes up to `num_seqs` groups; returns how many.
SAGE_EXPORT int64_t sage_group_by_prefix(AttentionRows* seqs, int64_t num_seqs, int64_t block_size,
                                         int32_t num_threads, AttentionGroup* groups) {
  const std::vector<AttentionGroup> found = group_by_prefix(seqs, num_seqs, block_size, num_threads);
  std::copy(found.begin(), found.end(), groups);
  return static_cast<int64_t>(found.size());
}
