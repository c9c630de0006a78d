// Cuts one call's attention into items of work. What is cut off where never changes a result's bits.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention_tile.h"

namespace sage::attention_detail {

// Sequences with at most this many rows (decodes, drafts to verify) are cut along their KV, others along their rows.
constexpr int64_t kDraftRows = 16;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// A part of the work, for one member of the team.
struct Item {
  enum class What { chunk, draft, shared } what;
  int64_t seq;    // shared: the one whose block table leads to the prefix
  Range rows;     // chunk, draft: of the sequence; shared: of all drafts' rows, in their order
  Range heads;    // KV heads
  Range splits;   // chunk: all; shared: one; draft: one, or all
};

class Plan {
 public:
  static int64_t table_length(int64_t num_seqs) { return 4 * (num_seqs + 1); }

  // `table`: table_length() numbers that the plan keeps its sums in.
  Plan(const AttentionShape& shape, const AttentionRows* seqs, int64_t num_seqs, int team_size, int64_t shared_tokens,
       int64_t* table)
      : shape_(shape), seqs_(seqs), num_seqs_(num_seqs), group_(shape.num_heads / shape.num_kv_heads),
        rows_per_tile_(std::max<int64_t>(1, kMaxQueries / group_)), chunk_items_(table),
        draft_items_(table + num_seqs + 1), draft_rows_(table + 2 * (num_seqs + 1)), partials_(table + 3 * (num_seqs + 1)) {
    count_rows();
    plan_shared(shared_tokens);
    plan_items(team_size);
  }

  int64_t num_items() const { return num_chunk_items() + num_shared_items_ + draft_items_[num_seqs_]; }
  int64_t num_draft_rows() const { return draft_rows_[num_seqs_]; }
  int64_t num_partials() const { return reads_whole_ ? 0 : partials_[num_seqs_]; }

  static bool is_draft(const AttentionRows& seq) { return seq.num_rows <= kDraftRows; }

  // First position that a query at `position` sees.
  static int64_t first_seen(const AttentionShape& shape, int64_t position) {
    return shape.window == 0 ? 0 : std::max<int64_t>(0, position + 1 - shape.window);
  }

  // The splits that rows [begin, end) of a sequence see.
  static Range splits_of(const AttentionShape& shape, const AttentionRows& seq, Range rows) {
    const int64_t start = seq.length - seq.num_rows;
    return {first_seen(shape, start + rows.begin) / kSplitTokens, (start + rows.end - 1) / kSplitTokens + 1};
  }

  Range splits_of(const AttentionRows& seq) const { return splits_of(shape_, seq, {0, seq.num_rows}); }

  // Softmaxes of parts of a draft's KV, counted in rows and splits: none where one split is all.
  static int64_t num_partials_of(const AttentionShape& shape, const AttentionRows& seq) {
    const int64_t splits = splits_of(shape, seq, {0, seq.num_rows}).size();
    return is_draft(seq) && splits > 1 ? seq.num_rows * splits : 0;
  }

  // The place of one row's partial softmax of one split; -1: no other member has some of the row's splits.
  int64_t partial(int64_t seq, int64_t row, int64_t split) const {
    const Range splits = splits_of(seqs_[seq]);
    return reads_whole_ || splits.size() == 1 ? -1 : partials_[seq] + row * splits.size() + split - splits.begin;
  }

  // The sequence of one of all drafts' rows.
  int64_t seq_of_draft_row(int64_t row) const { return find(draft_rows_, row); }
  int64_t first_draft_row(int64_t seq) const { return draft_rows_[seq]; }

  // Chunks come first, as they are the longest; of each chunk the rows that see most.
  Item item(int64_t i) const {
    if (i < num_chunk_items()) return chunk_item(i);
    i -= num_chunk_items();
    return i < num_shared_items_ ? shared_item(i) : draft_item(i - num_shared_items_);
  }

 private:
  int64_t num_chunk_items() const { return chunk_items_[num_seqs_]; }

  void count_rows() {
    int64_t rows = 0, partials = 0;
    for (int64_t s = 0; s < num_seqs_; ++s) {
      draft_rows_[s] = rows;
      partials_[s] = partials;
      if (is_draft(seqs_[s])) rows += seqs_[s].num_rows;
      partials += num_partials_of(shape_, seqs_[s]);
    }
    draft_rows_[num_seqs_] = rows;
    partials_[num_seqs_] = partials;
  }

  // Drafts of a batch are read whole if they are so many: else their splits are items, which is fairer.
  static constexpr int64_t kItemsPerMember = 16;

  // Whole splits of the prefix are read once for all drafts.
  void plan_shared(int64_t shared_tokens) {
    first_draft_ = find(draft_rows_, 0);
    const int64_t rows = num_draft_rows();
    shared_splits_ = rows > 0 && draft_rows_[first_draft_ + 1] < rows ? shared_tokens / kSplitTokens : 0;
    shared_rows_ = std::min(rows, rows_per_tile_);
    shared_heads_ = heads_per_item(shared_rows_, shape_.num_kv_heads);
    num_shared_items_ = shared_splits_ == 0 ? 0 : shared_splits_ * pieces(rows, shared_rows_) * head_groups(shared_heads_);
  }

  // The heads of a block lie side by side, so that an item takes all of them unless members would wait.
  void plan_items(int team_size) {
    int64_t chunk_items = 0, units = 0, num_drafts = 0, most_rows = 1;
    for (int64_t s = 0; s < num_seqs_; ++s) num_drafts += is_draft(seqs_[s]) && seqs_[s].num_rows > 0;
    reads_whole_ = shared_splits_ == 0 && num_drafts >= kItemsPerMember * team_size;
    for (int64_t s = 0; s < num_seqs_; ++s) {
      chunk_items_[s] = chunk_items;
      draft_items_[s] = units;
      if (is_draft(seqs_[s])) {
        units += (reads_whole_ ? 1 : own_splits(seqs_[s]).size()) * pieces(seqs_[s].num_rows, rows_per_tile_);
        most_rows = std::max(most_rows, seqs_[s].num_rows);
      } else {
        chunk_items += pieces(seqs_[s].num_rows, rows_per_tile_) * shape_.num_kv_heads;
      }
    }
    chunk_items_[num_seqs_] = chunk_items;
    draft_items_[num_seqs_] = units;
    const int64_t groups = pieces(2 * team_size, std::max<int64_t>(1, units));
    draft_heads_ = heads_per_item(std::min(most_rows, rows_per_tile_), pieces(shape_.num_kv_heads, groups));
    for (int64_t s = 0; s <= num_seqs_; ++s) draft_items_[s] *= head_groups(draft_heads_);
  }

  static int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }
  int64_t head_groups(int64_t heads) const { return pieces(shape_.num_kv_heads, heads); }

  int64_t heads_per_item(int64_t rows, int64_t most) const {
    return std::clamp<int64_t>(kMaxQueries / round_up(std::max<int64_t>(1, rows) * group_, kQueryStep), 1, most);
  }

  // The splits that a draft reads for itself alone.
  Range own_splits(const AttentionRows& seq) const {
    const Range all = splits_of(seq);
    return {std::clamp(shared_splits_, all.begin, all.end), all.end};
  }

  // The sequence in whose part of the sums `i` lies; sequences with an empty part are passed over.
  int64_t find(const int64_t* sums, int64_t i) const { return std::upper_bound(sums, sums + num_seqs_, i) - sums - 1; }

  Item chunk_item(int64_t i) const {
    const int64_t seq = find(chunk_items_, i), tiles = pieces(seqs_[seq].num_rows, rows_per_tile_);
    i -= chunk_items_[seq];
    const int64_t tile = tiles - 1 - i % tiles, head = i / tiles;
    const Range rows = rows_of_tile(tile, rows_per_tile_, seqs_[seq].num_rows);
    return {Item::What::chunk, seq, rows, {head, head + 1}, splits_of(shape_, seqs_[seq], rows)};
  }

  Item shared_item(int64_t i) const {
    const int64_t tiles = pieces(num_draft_rows(), shared_rows_), groups = head_groups(shared_heads_);
    const int64_t group = i % groups, tile = i / groups % tiles, split = i / groups / tiles;
    return {Item::What::shared, first_draft_, rows_of_tile(tile, shared_rows_, num_draft_rows()),
            heads_of_group(group, shared_heads_), {split, split + 1}};
  }

  Item draft_item(int64_t i) const {
    const int64_t seq = find(draft_items_, i), tiles = pieces(seqs_[seq].num_rows, rows_per_tile_);
    i -= draft_items_[seq];
    const int64_t groups = head_groups(draft_heads_), group = i % groups, tile = i / groups % tiles;
    const Range own = own_splits(seqs_[seq]);
    const int64_t split = own.begin + i / groups / tiles;
    return {Item::What::draft, seq, rows_of_tile(tile, rows_per_tile_, seqs_[seq].num_rows),
            heads_of_group(group, draft_heads_), reads_whole_ ? own : Range{split, split + 1}};
  }

  static Range rows_of_tile(int64_t tile, int64_t size, int64_t count) {
    return {tile * size, std::min(count, (tile + 1) * size)};
  }

  Range heads_of_group(int64_t group, int64_t size) const {
    return {group * size, std::min(shape_.num_kv_heads, (group + 1) * size)};
  }

  const AttentionShape& shape_;
  const AttentionRows* seqs_;
  int64_t num_seqs_, group_, rows_per_tile_;
  // Sums over the sequences before each, the totals behind: items, rows of drafts, partial softmaxes.
  int64_t *chunk_items_, *draft_items_, *draft_rows_, *partials_;
  int64_t first_draft_ = 0, shared_splits_ = 0, shared_rows_ = 0, shared_heads_ = 1, num_shared_items_ = 0, draft_heads_ = 1;
  bool reads_whole_ = false;
};

}  // namespace sage::attention_detail
