// What the kernels share that read all heads of a tile together, as memory lies.
//
// A block's keys of all heads lie side by side, its values behind them. 32 decodes that read them in that order get 29 of the
// 33 GB/s of a Zen 4's memory; head after head through the blocks of a tile it was 24.
#pragma once
#include <type_traits>

#include "attention_tile.h"

namespace sage::attention_detail {

// The order in which a tile is read: its keys, its values, then the next tile's. Both come in pieces, the tokens of a block
// head after head, then those of the next block. For many queries of one head a piece is the whole tile.
class Pieces {
 public:
  Pieces(const KV& kv, const Queries& queries, KVTile& tile, const KVTile* following)
      : kv_(kv), queries_(queries), tile_(tile), following_(following) {
    const bool is_in_block = kv.block_size % 16 == 0 && (kTileTokens % kv.block_size == 0 || kv.block_size % kTileTokens == 0);
    const bool is_whole = kv.block_size >= kTileTokens || (queries.num_heads == 1 && queries.count > kFewQueries);
    size_ = is_whole ? kTileTokens : is_in_block ? kv.block_size : 16;
    is_contiguous_ = size_ <= kv.block_size && is_in_block;
    lead_ = std::max<int64_t>(1, kLeadBytes / (size_ * kv.token));
    first_ = tile.begin / size_;
    count_ = ((tile.end + size_ - 1) / size_ - first_) * queries.num_heads;
    num_following_ = following == nullptr ? 0 : (following->end + size_ - 1) / size_ * queries.num_heads;
  }

  // body(head, begin, end, ahead) for tokens [begin, end) of each head, which the tile then points to. `ahead` is what is to
  // be asked for meanwhile, row after row.
  template <class Body>
  void for_keys(const Body& body) {
    for_all(0, body);
  }

  template <class Body>
  void for_values(const Body& body) {
    for_all(count_, body);
  }

 private:
  template <class Body>
  void for_all(int64_t number, const Body& body) {
    for (int64_t t = first_ * size_; t < tile_.end; t += size_) {
      for (int64_t head = 0; head < queries_.num_heads; ++head) {
        tile_.select_tokens(kv_, queries_.first_head + head, t, t + size_);
        body(head, t, t + size_, address(number++ + lead_));
      }
    }
  }

  // Where a piece is; elsewhere if it is in several blocks.
  const unsigned char* address(int64_t number) const {
    const bool is_next = number >= 2 * count_;
    if (!is_contiguous_ || (is_next && number - 2 * count_ >= num_following_)) return kZeros;
    const KVTile& tile = is_next ? *following_ : tile_;
    const bool is_value = !is_next && number >= count_;
    number -= is_next ? 2 * count_ : is_value ? count_ : 0;
    const int64_t begin = ((is_next ? 0 : first_) + number / queries_.num_heads) * size_, token = std::max(begin, tile.begin);
    const int64_t head = queries_.first_head + number % queries_.num_heads;
    return tile.key_of_head_0[token] - (token - begin) * kv_.token + head * kv_.head + (is_value ? kv_.kv : 0);
  }

  static constexpr int64_t kFewQueries = 8;
  // 4 KiB: 5 % slower. 16 KiB: no faster.
  static constexpr int64_t kLeadBytes = 8192;

  const KV& kv_;
  const Queries& queries_;
  KVTile& tile_;
  const KVTile* following_;
  int64_t size_, lead_, first_, count_, num_following_;
  bool is_contiguous_;
};

// body(rows, first) for at most so many queries at a time; `rows` is a constant.
template <int64_t most, class Body>
inline void for_few(int64_t count, const Body& body, int64_t first = 0) {
  for (; first + most <= count; first += most) body(std::integral_constant<int64_t, most>(), first);
  if constexpr (most > 1) for_few<most / 2>(count, body, first);
}

// Which of a tile's tokens [begin, end) queries i, i + 1, ... see: each [low, high), all of them within [from, to), which
// begins at a multiple of 8. Nothing: from >= to.
template <int64_t rows>
struct Seen {
  int64_t low[rows], high[rows], from, to;

  Seen(const Queries& queries, int64_t i, const KVTile& tile, int64_t begin, int64_t end) : from(end), to(begin) {
    for (int64_t r = 0; r < rows; ++r) {
      low[r] = std::max({begin, tile.begin, queries.low[i + r] - tile.first});
      high[r] = std::min({end, tile.end, queries.high[i + r] - tile.first});
      if (low[r] >= high[r]) continue;
      from = std::min(from, low[r]);
      to = std::max(to, high[r]);
    }
    if (any()) from = from / 8 * 8;
  }

  bool any() const { return from < to; }
};

}  // namespace sage::attention_detail
