// Attention over paged KV: decodes, chunks of prompts and drafts in one call. One implementation per build.
#pragma once
#include <cstdint>
#include <vector>

#include "team.h"

namespace sage {

enum class KVKind : int32_t { bf16 = 0, f16 = 1, int8 = 2, f32 = 3, fp8 = 4 };

constexpr int64_t value_bytes(KVKind kind) {
  return kind == KVKind::f32 ? 4 : kind == KVKind::int8 || kind == KVKind::fp8 ? 1 : 2;
}

constexpr bool is_scaled(KVKind kind) { return value_bytes(kind) == 1; }

// The KV of all blocks. Strides in bytes: block, layer, keys to values, head, token (values of a token are
// contiguous). int8 and fp8 (E4M3) have one float32 scale per token behind the values of its block, at
// block + scales + layer * layer_scales + kv * kv_scales + head * head_scales + token * 4. Those of fp8 are powers of
// two, so that a value times its scale is exact in bf16.
struct KV {
  KVKind kind;
  unsigned char* base;
  int64_t block_size;  // tokens
  int64_t block, layer, kv, head, token;
  int64_t scales, layer_scales, kv_scales, head_scales;
};

struct AttentionShape {
  int64_t num_heads, num_kv_heads, head_dim;  // head_dim: a multiple of 16, at most 256
  float scale;
  int64_t window;  // tokens a query sees, itself included; 0: all
  float soft_cap;  // 0: none
};

// The rows of one sequence: tokens [length - num_rows, length), the last of its first `length`.
struct AttentionRows {
  const int32_t* blocks;
  int64_t first_row, num_rows, length;
};

// Writes one token's key and value of one head.
void store_kv(const KV&, int64_t layer, int64_t kv_head, int64_t head_dim, int64_t slot, const float* key, const float* value);

// Bytes of scratch that `attend` needs for such a step, for the whole team.
int64_t attention_scratch_bytes(const AttentionShape&, const KV&, const AttentionRows*, int64_t num_seqs, int team_size);

// query, out: (rows, num_heads, head_dim) float32, of `query` `query_stride` values from row to row. KV of all rows is
// stored already. Every member of the team calls it; it ends with a barrier. `shared_blocks` leading blocks, the same for all decodes and drafts, are read once
// for all of these. A row's result has the same bits whatever other sequences there are and however much is shared.
void attend(Team&, const AttentionShape&, const KV&, int64_t layer, const AttentionRows*, int64_t num_seqs,
            int64_t shared_blocks, const float* query, int64_t query_stride, float* out, unsigned char* scratch);

// Sequences [begin, end) of a call, to be attended together.
struct AttentionGroup {
  int64_t begin, end, shared_blocks;
};

// Reorders sequences so that decodes and drafts lie beside those with which they share so long a prefix that it is
// worth reading it for all of them together. Returns groups that hold each sequence once.
std::vector<AttentionGroup> group_by_prefix(AttentionRows*, int64_t num_seqs, int64_t block_size, int team_size);

}  // namespace sage
