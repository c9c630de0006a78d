// Finds the sequences of a call that begin with the same blocks.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "attention_plan.h"

namespace sage {
namespace {

using attention_detail::kSplitTokens;
using attention_detail::Plan;

// What one more call costs, in tokens of one sequence that it could have read meanwhile: its barriers, and members
// that wait there for the last piece of work. Measured on 2 cores with 8 heads of 128 in bf16: 0.3 ms.
constexpr int64_t kCallTokens = 1024;

// Divides decodes and drafts, sorted by their blocks, into groups of neighbours.
class Division {
 public:
  Division(const AttentionRows* seqs, int64_t num_seqs, int64_t block_size, int team_size)
      : block_size_(block_size), team_size_(team_size), common_(num_seqs, 0) {
    for (int64_t seq = 1; seq < num_seqs; seq++) common_[seq] = common_blocks(seqs[seq - 1], seqs[seq]);
  }

  std::vector<AttentionGroup> best() const {
    std::vector<AttentionGroup> groups;
    divide(0, num_seqs(), groups);
    return groups;
  }

 private:
  int64_t num_seqs() const { return static_cast<int64_t>(common_.size()); }

  int64_t common_blocks(const AttentionRows& a, const AttentionRows& b) const {
    const int64_t whole = std::min(a.length, b.length) / block_size_;
    return std::mismatch(a.blocks, a.blocks + whole, b.blocks).first - a.blocks;
  }

  // Adds those groups of sequences [begin, end) that save most; returns how many tokens need not be read.
  int64_t divide(int64_t begin, int64_t end, std::vector<AttentionGroup>& groups) const {
    if (end - begin < 2) return 0;
    const int64_t least = *std::min_element(common_.begin() + begin + 1, common_.begin() + end);
    const int64_t together = saved(end - begin, least);
    std::vector<AttentionGroup> parts;
    int64_t apart = 0;
    for (int64_t from = begin, seq = begin + 1; seq <= end; seq++) {
      if (seq < end && common_[seq] > least) continue;
      apart += divide(from, seq, parts);
      from = seq;
    }
    if (apart > together) {
      groups.insert(groups.end(), parts.begin(), parts.end());
      return apart;
    }
    if (together > 0) groups.push_back({begin, end, least});
    return together;
  }

  int64_t saved(int64_t count, int64_t blocks) const {
    const int64_t splits = blocks * block_size_ / kSplitTokens;  // whole ones are read once
    // One member reads a split for all, while the others may have nothing else to do.
    if (count * splits <= team_size_) return 0;
    const int64_t cost = count == num_seqs() ? 0 : kCallTokens;
    return std::max<int64_t>(0, (count - 1) * splits * kSplitTokens - cost);
  }

  int64_t block_size_, team_size_;
  std::vector<int64_t> common_;  // leading blocks of each sequence that are those of the one before it
};

}  // namespace

std::vector<AttentionGroup> group_by_prefix(AttentionRows* seqs, int64_t num_seqs, int64_t block_size, int team_size) {
  AttentionRows* const end = seqs + num_seqs;
  AttentionRows* const drafts = std::partition(seqs, end, [](const AttentionRows& seq) { return !Plan::is_draft(seq); });
  std::sort(drafts, end, [&](const AttentionRows& a, const AttentionRows& b) {
    return std::lexicographical_compare(a.blocks, a.blocks + a.length / block_size, b.blocks,
                                        b.blocks + b.length / block_size);
  });
  const std::vector<AttentionGroup> found = Division(drafts, end - drafts, block_size, team_size).best();

  // Drafts that share nothing become the first group. Chunks belong to any: they go with the first.
  const std::vector<AttentionRows> sorted(drafts, end);
  AttentionRows* next = drafts;
  int64_t seq = 0;
  for (const AttentionGroup& group : found) {
    next = std::copy(sorted.begin() + seq, sorted.begin() + group.begin, next);
    seq = group.end;
  }
  next = std::copy(sorted.begin() + seq, sorted.end(), next);
  std::vector<AttentionGroup> groups;
  if (next != drafts || found.empty()) groups.push_back({0, next - seqs, 0});
  for (const AttentionGroup& group : found) {
    const int64_t begin = groups.empty() ? 0 : next - seqs;
    next = std::copy(sorted.begin() + group.begin, sorted.begin() + group.end, next);
    groups.push_back({begin, next - seqs, group.shared_blocks});
  }
  return groups;
}

}  // namespace sage
