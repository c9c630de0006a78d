// What the kernels share that read all heads of a tile together, as memory lies.
//
// A block's keys of all heads lie side by side, its values behind them. 32 decodes that read them in that order get 29 of the
// 33 GB/s of a Zen 4's memory; head after head through the blocks of a tile it was 24.
#pragma once
#include <type_traits>

#include "attention_tile.h"

namespace sage::attention_detail {

// Tokens [begin, end) of a tile, of one head: their rows lie one behind the other.
struct Piece {
  int64_t begin, end;
  const unsigned char* rows;
  const unsigned char* ahead;  // what is to be asked for meanwhile, as many rows
};

// The order in which a tile is read: its keys, its values, then the next tile's. Both come in pieces, the tokens of a block
// head after head, then those of the next block.
class Pieces {
 public:
  // `copies`: kTileTokens rows, for pieces that cannot be used where they lie.
  Pieces(const KV& kv, int64_t row_bytes, const Queries& queries, const KVTile& tile, const KVTile* following, unsigned char* copies)
      : kv_(kv), queries_(queries), tile_(tile), following_(following), row_bytes_(row_bytes), copies_(copies) {
    const bool is_in_block = kv.block_size % 16 == 0 && (kTileTokens % kv.block_size == 0 || kv.block_size % kTileTokens == 0);
    size_ = is_in_block ? std::min(kv.block_size, kTileTokens) : 16;
    is_in_place_ = is_in_block && kv.token == row_bytes;
    first_ = tile.begin / size_ * size_;
    num_keys_ = (tile.end - first_ + size_ - 1) / size_ * queries.num_heads;
    lead_ = std::max<int64_t>(1, kLeadBytes / (size_ * row_bytes));
  }

  // body(head, piece) for each head's keys
  template <class Body>
  void for_keys(const Body& body) {
    for_all(0, body);
  }

  template <class Body>
  void for_values(const Body& body) {
    for_all(num_keys_, body);
  }

  // body(piece) for those of one head.
  template <class Body>
  void for_keys_of(int64_t head, const Body& body) {
    for_head(head, 0, body);
  }

  template <class Body>
  void for_values_of(int64_t head, const Body& body) {
    for_head(head, num_keys_, body);
  }

 private:
  template <class Body>
  void for_all(int64_t number, const Body& body) {
    Place ahead = place(number + lead_);
    for (int64_t t = first_; t < tile_.end; t += size_) {
      for (int64_t head = 0; head < queries_.num_heads; ++head) {
        if (kv_.kind == KVKind::fp8) ask_scales(ahead);
        body(head, Piece{t, t + size_, rows(t, head, number >= num_keys_), address(ahead)});
        advance(ahead);
      }
    }
  }

  // Its own pieces alone are asked for: the values after the keys, then the next tile's keys.
  template <class Body>
  void for_head(int64_t head, int64_t number, const Body& body) {
    const bool are_values = number >= num_keys_;
    for (int64_t t = first_; t < tile_.end; t += size_) {
      const Place ahead = are_values ? Place{following_, t - first_, head, false} : Place{&tile_, t, head, true};
      if (kv_.kind == KVKind::fp8) ask_scales(ahead);
      body(Piece{t, t + size_, rows(t, head, are_values), address(ahead)});
    }
  }

  struct Place {
    const KVTile* tile;  // null: behind the last
    int64_t token, head;
    bool is_value;
  };

  // A piece by its number, counted from the tile's first.
  Place place(int64_t number) const {
    Place at{&tile_, first_, 0, false};
    if (number >= num_keys_) {
      at.is_value = number < 2 * num_keys_;
      number -= at.is_value ? num_keys_ : 2 * num_keys_;
      if (!at.is_value) at = {following_, 0, 0, false};
    }
    at.token += number / queries_.num_heads * size_;
    at.head = number % queries_.num_heads;
    return at;
  }

  void advance(Place& at) const {
    if (at.tile == nullptr || ++at.head < queries_.num_heads) return;
    at.head = 0;
    at.token += size_;
    if (at.token < at.tile->end) return;
    if (at.tile == following_) {
      at.tile = nullptr;
    } else if (at.is_value) {
      at = {following_, 0, 0, false};
    } else {
      at = {&tile_, first_, 0, true};
    }
  }

  // Those of int8 are not needed before all keys are read: its kernels ask for them.
  void ask_scales(const Place& at) const {
    if (at.tile == nullptr) return;
    const int64_t end = std::min(at.token + size_, at.tile->end);
    for (int64_t t = std::max(at.token, at.tile->begin); t < end; t += 16) {
      prefetch_far(at.tile->scales_of(kv_, t, queries_.first_head + at.head, at.is_value));
    }
  }

  const unsigned char* address(const Place& at) const {
    if (!is_in_place_ || at.tile == nullptr || at.token >= at.tile->end) return kZeros;
    return address(*at.tile, at.token, at.head, at.is_value);
  }

  // Of tokens that lie in one block, some of which are in the tile.
  const unsigned char* address(const KVTile& tile, int64_t t, int64_t head, bool is_value) const {
    const int64_t known = std::max(t, tile.begin);
    return tile.key_of_head_0[known] - (known - t) * kv_.token + (queries_.first_head + head) * kv_.head + (is_value ? kv_.kv : 0);
  }

  const unsigned char* rows(int64_t t, int64_t head, bool is_value) const {
    if (is_in_place_ && t >= tile_.begin && t + size_ <= tile_.end) return address(tile_, t, head, is_value);
    for (int64_t i = 0; i < size_; ++i) {
      unsigned char* to = copies_ + i * row_bytes_;
      if (t + i < tile_.begin || t + i >= tile_.end) {
        std::memset(to, 0, static_cast<size_t>(row_bytes_));
      } else {
        const int64_t offset = (queries_.first_head + head) * kv_.head + (is_value ? kv_.kv : 0);
        std::memcpy(to, tile_.key_of_head_0[t + i] + offset, static_cast<size_t>(row_bytes_));
      }
    }
    return copies_;
  }

  static constexpr int64_t kLeadBytes = 8192;

  const KV& kv_;
  const Queries& queries_;
  const KVTile& tile_;
  const KVTile* following_;
  int64_t row_bytes_;
  unsigned char* copies_;
  int64_t size_, lead_, first_, num_keys_;
  bool is_in_place_;
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
