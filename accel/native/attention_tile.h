// What all attention kernels share: 64 tokens of KV, the queries of one item of work, and their running softmax.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention.h"
#include "vectors.h"

namespace sage::attention_detail {

// A tile begins at a multiple of kTileTokens and a split at a multiple of kSplitTokens of a sequence, whatever is
// computed: so every row's sums are taken in one order, whether it is decoded, verified or part of any chunk.
constexpr int64_t kTileTokens = 64;
constexpr int64_t kSplitTokens = 256;
constexpr int64_t kMaxQueries = 256;  // of one item of work, those of all its heads together
constexpr int64_t kQueryStep = 16;    // the queries of a head begin at multiples of this
constexpr int64_t kMaxHeadDim = 256;
constexpr float kNone = -1e30f;  // maximum over no tokens; finite, so that differences are never NaN

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

template <KVKind kind>
inline Vec load_as_float(const unsigned char* row, int64_t element) {
  if constexpr (kind == KVKind::f32) {
    return load(reinterpret_cast<const float*>(row + element * 4));
  } else if constexpr (kind == KVKind::bf16) {
    return load_bf16(row + element * 2);
  } else if constexpr (kind == KVKind::f16) {
    return load_f16(row + element * 2);
  } else if constexpr (kind == KVKind::int8) {
    return load_int8(row + element);
  } else {
    return load_fp8(row + element);
  }
}

// Asks for what is read next, a few rows at a time: in one burst the requests would fill the core's buffers and hold up
// the work that they are to overlap with. While a head's keys are used that is its values, and then the next keys: as
// close as that, as farther requests hold up nearer ones (32 decodes took 5 % longer a whole tile ahead).
class Prefetch {
 public:
  Prefetch(const KV& kv, int64_t head_dim)
      : row_bytes_(head_dim * value_bytes(kv.kind)),
        // Tokens of a block that lie side by side.
        run_(kv.token == row_bytes_ ? kv.block_size : 1) {}

  // Then the rows of tokens [begin, end) of a tile, `offset` away from `keys`; `first`: the position of the first.
  void add(const unsigned char* const* keys, int64_t begin, int64_t end, int64_t first, int64_t offset) {
    parts_[num_parts_++] = {keys, begin, end, run_ - first % run_, offset};
  }

  void rows(int64_t count) {
    for (; count > 0; --count) {
      if (at_ >= run_end_ && !next_run()) return;
      const char* row = at_;
      if (row_bytes_ == 256) {  // the usual lengths, unrolled
        ask_lines<4>(row);
      } else if (row_bytes_ == 128) {
        ask_lines<2>(row);
      } else {
        for (int64_t i = 0; i < row_bytes_; i += 64) ask_lines<1>(row + i);
      }
      at_ = row + row_bytes_;
    }
  }

 private:
  struct Part {
    const unsigned char* const* keys;
    int64_t token, end, run, offset;
  };

  // The L1 cache is full of what is used now.
  template <int lines>
  static void ask_lines(const char* at) {
    for (int i = 0; i < lines; ++i) prefetch_far(at + i * 64);
  }

  bool next_run() {
    if (part_ < num_parts_ && parts_[part_].token >= parts_[part_].end) ++part_;
    if (part_ == num_parts_) return false;
    Part& part = parts_[part_];
    const int64_t count = std::min(part.run, part.end - part.token);
    at_ = reinterpret_cast<const char*>(part.keys[part.token]) + part.offset;
    run_end_ = at_ + count * row_bytes_;
    part.token += count;
    part.run = run_;
    return true;
  }

  Part parts_[2];
  int64_t part_ = 0, num_parts_ = 0, row_bytes_, run_;
  const char *at_ = nullptr, *run_end_ = nullptr;
};

// Pointers to the keys and values of 64 tokens. Those outside [begin, end) are not the sequence's or no query sees
// them: they read as zeros, as their memory may hold anything.
struct KVTile {
  int64_t first;  // position of token 0
  int64_t begin, end;
  const unsigned char* key[kTileTokens];
  const unsigned char* value[kTileTokens];
  alignas(64) float key_scale[kTileTokens];  // of KV in 8 bits
  alignas(64) float value_scale[kTileTokens];
  // The same of the first head of the model.
  const unsigned char* key_of_head_0[kTileTokens];
  const float* scale_of_head_0[kTileTokens];

  void locate(const KV& kv, int64_t layer, const int32_t* blocks, int64_t tile_first, int64_t from, int64_t to);
  void select_head(const KV& kv, int64_t head);
  void select_tokens(const KV& kv, int64_t head, int64_t from, int64_t to);
  void select_scales(const KV& kv, int64_t head);
  const float* scales_of(const KV& kv, int64_t token, int64_t head, bool is_value) const;
  void ask_scales(const KV& kv, int64_t head, int64_t from, int64_t to) const;
};

alignas(64) inline constexpr unsigned char kZeros[kMaxHeadDim * 4] = {};

inline void KVTile::locate(const KV& kv, int64_t layer, const int32_t* blocks, int64_t tile_first, int64_t from,
                           int64_t to) {
  first = tile_first;
  begin = from - first;
  end = to - first;
  for (int64_t t = 0; t < kTileTokens; ++t) key[t] = value[t] = kZeros;
  std::memset(key_scale, 0, sizeof key_scale);
  std::memset(value_scale, 0, sizeof value_scale);
  for (int64_t t = begin; t < end;) {
    const int64_t offset = (first + t) % kv.block_size, run = std::min(end - t, kv.block_size - offset);
    const unsigned char* block = kv.base + blocks[(first + t) / kv.block_size] * kv.block;
    const unsigned char* token = block + layer * kv.layer + offset * kv.token;
    const float* scale = reinterpret_cast<const float*>(block + kv.scales + layer * kv.layer_scales) + offset;
    for (int64_t i = 0; i < run; ++i) {
      key_of_head_0[t + i] = token + i * kv.token;
      scale_of_head_0[t + i] = scale + i;
    }
    t += run;
  }
}

inline void KVTile::select_head(const KV& kv, int64_t head) {
  select_tokens(kv, head, begin, end);
  if (is_scaled(kv.kind)) select_scales(kv, head);
}

// Those of tokens [from, to) alone.
inline void KVTile::select_tokens(const KV& kv, int64_t head, int64_t from, int64_t to) {
  const int64_t offset = head * kv.head;
  for (int64_t t = std::max(from, begin); t < std::min(to, end); ++t) {
    key[t] = key_of_head_0[t] + offset;
    value[t] = key_of_head_0[t] + offset + kv.kv;
  }
}

// Scales lie elsewhere than values, in pieces too short for the processor to see where they go on.
inline void KVTile::ask_scales(const KV& kv, int64_t head, int64_t from, int64_t to) const {
  for (int64_t t = std::max(from, begin); t < std::min(to, end); t += 16) {
    prefetch_far(scales_of(kv, t, head, false));
    prefetch_far(scales_of(kv, t, head, true));
  }
}

// The scale of a token's key or value, before those of the tokens that follow in its block.
inline const float* KVTile::scales_of(const KV& kv, int64_t token, int64_t head, bool is_value) const {
  return scale_of_head_0[token] + head * (kv.head_scales / 4) + (is_value ? kv.kv_scales / 4 : 0);
}

inline void KVTile::select_scales(const KV& kv, int64_t head) {
  const int64_t keys = head * (kv.head_scales / 4), values = keys + kv.kv_scales / 4;
  for (int64_t t = begin; t < end;) {
    const float* scale = scale_of_head_0[t];
    if (t % 16 == 0 && t + 16 <= end && kv.block_size % 16 == 0) {
      std::copy_n(scale + keys, 16, key_scale + t);
      std::copy_n(scale + values, 16, value_scale + t);
      t += 16;
    } else {
      key_scale[t] = scale[keys];
      value_scale[t++] = scale[values];
    }
  }
}

// Softmax so far of one query: with x the scores times log2(e), m = max x, l = sum 2^(x - m), and the accumulator
// sum 2^(x - m) value.
struct Softmax {
  float* m;
  float* l;
  float* acc;  // (queries, head_dim)

  void clear(int64_t begin, int64_t count, int64_t head_dim) const {
    std::fill_n(m + begin, count, kNone);
    std::fill_n(l + begin, count, 0.0f);
    std::fill_n(acc + begin * head_dim, count * head_dim, 0.0f);
  }
};

// total becomes the softmax over the tokens of both. Splits are folded in their order.
inline void fold(float& m, float& l, float* acc, float other_m, float other_l, const float* other, int64_t head_dim) {
  const float top = std::max(m, other_m), mine = exp2(m - top), its = exp2(other_m - top);
  l = l * mine + other_l * its;
  m = top;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    store(acc + d, fma(load(other + d), all(its), mul(load(acc + d), all(mine))));
  }
}

// The queries of one item of work: `count` of each of `num_heads` KV heads. Those of head h (counted from
// `first_head`) have the numbers [h * stride, h * stride + count) in `query` and in `softmax`.
struct Queries {
  int64_t first_head, num_heads, count, stride;
  const float* query[kMaxQueries];
  alignas(64) int32_t low[kMaxQueries];   // positions seen: [low, high), the same for all heads
  alignas(64) int32_t high[kMaxQueries];
  Softmax softmax;
};

// body(head, ahead) for one head of the queries after the other, whose KV the tile then points to; `ahead` is to ask for
// what is read next.
template <class Body>
inline void for_heads(const KV& kv, int64_t head_dim, const Queries& queries, KVTile& tile, const KVTile* following,
                      const Body& body) {
  const auto add = [](Prefetch& ahead, const KVTile& from, int64_t offset) {
    ahead.add(from.key_of_head_0, from.begin, from.end, from.first + from.begin, offset);
  };
  const int64_t first = queries.first_head, last = first + queries.num_heads - 1;
  for (int64_t head = first; head <= last; ++head) {
    tile.select_head(kv, head);
    Prefetch ahead(kv, head_dim);
    add(ahead, tile, head * kv.head + kv.kv);
    if (head < last) add(ahead, tile, (head + 1) * kv.head);
    if (head == last && following != nullptr) add(ahead, *following, first * kv.head);
    const KVTile* next = head < last ? &tile : following;
    if (is_scaled(kv.kind) && next != nullptr) next->ask_scales(kv, head < last ? head + 1 : first, next->begin, next->end);
    body(head - first, ahead);
  }
}

// How a raw product q . k becomes a score times log2(e).
struct Scoring {
  float scale;     // of the product; with a soft cap, of what goes into tanh
  float soft_cap;  // times log2(e); 0: none

  Vec operator()(Vec product) const {
    const Vec x = mul(product, all(scale));
    return soft_cap == 0.0f ? x : mul(all(soft_cap), tanh(x));
  }
};

// One query and one tile: raw products in `row` become 2^(x - m), 0 where unseen; the accumulator is brought to the new
// maximum. In 8 bits: products times key_scale, and what comes out times value_scale. Tokens [low, high) are seen.
inline void softmax_row(const Scoring& score, float* row, int64_t low, int64_t high, const KVTile* scales, float& m, float& l,
                        float* acc, int64_t head_dim) {
  const Vec from = all(static_cast<float>(low) - 0.5f), to = all(static_cast<float>(high) - 0.5f);
  Vec top = all(kNone);
  for (int64_t t = 0; t < kTileTokens; t += kLanes) {
    const Vec token = add(lane_numbers(), all(static_cast<float>(t)));
    Vec x = load(row + t);
    if (scales != nullptr) x = mul(x, load(scales->key_scale + t));
    x = pick(both(less(from, token), less(token, to)), score(x), all(kNone));
    store(row + t, x);
    top = max(top, x);
  }
  const float new_m = std::max(m, maximum(top)), decay = exp2(m - new_m);
  Vec total = zero();
  for (int64_t t = 0; t < kTileTokens; t += kLanes) {
    const Vec token = add(lane_numbers(), all(static_cast<float>(t)));
    Vec p = exp2(sub(load(row + t), all(new_m)));
    p = pick(both(less(from, token), less(token, to)), p, zero());
    total = add(total, p);
    store(row + t, scales == nullptr ? p : mul(p, load(scales->value_scale + t)));
  }
  l = l * decay + sum(total);
  if (m != new_m) {
    for (int64_t d = 0; d < head_dim; d += kLanes) store(acc + d, mul(load(acc + d), all(decay)));
  }
  m = new_m;
}

}  // namespace sage::attention_detail
