// Attention of one layer by a team, and the storing of KV. The kernels are in headers of their own.
#include "attention.h"

#include "attention_float.h"
#include "attention_plan.h"
#if defined(__AMX_TILE__)
#include "attention_amx_bf16.h"
#include "attention_amx_int8.h"
#elif defined(__AVX512BF16__)
#include "attention_bf16.h"
#include "attention_vnni_int8.h"
#endif

namespace sage {
namespace {

using namespace attention_detail;

constexpr float kLog2e = 1.44269504089f;

template <KVKind kind>
struct KernelOf {
  using type = FloatKernel<kind>;
};

#if defined(__AMX_TILE__)
template <>
struct KernelOf<KVKind::bf16> {
  using type = AmxBf16Kernel<KVKind::bf16>;
};

template <>
struct KernelOf<KVKind::fp8> {
  using type = AmxBf16Kernel<KVKind::fp8>;
};

template <>
struct KernelOf<KVKind::int8> {
  using type = AmxInt8Kernel;
};
#elif defined(__AVX512BF16__)
template <>
struct KernelOf<KVKind::bf16> {
  using type = Bf16Kernel<KVKind::bf16>;
};

template <>
struct KernelOf<KVKind::fp8> {
  using type = Bf16Kernel<KVKind::fp8>;
};

template <>
struct KernelOf<KVKind::int8> {
  using type = VnniInt8Kernel;
};
#endif

template <KVKind kind>
using Kernel = typename KernelOf<kind>::type;

int64_t kernel_scratch_bytes(KVKind kind, int64_t head_dim) {
  switch (kind) {
    case KVKind::bf16: return Kernel<KVKind::bf16>::scratch_bytes(head_dim);
    case KVKind::f16: return Kernel<KVKind::f16>::scratch_bytes(head_dim);
    case KVKind::int8: return Kernel<KVKind::int8>::scratch_bytes(head_dim);
    case KVKind::fp8: return Kernel<KVKind::fp8>::scratch_bytes(head_dim);
    default: return Kernel<KVKind::f32>::scratch_bytes(head_dim);
  }
}

// A row's softmax over one split, on its way to the others: the accumulator, then m and l.
int64_t partial_floats(int64_t head_dim) { return head_dim + 16; }

// Memory that one member of the team works in.
struct Workspace {
  int64_t* table;
  Softmax part, total;
  unsigned char* kernel;
  unsigned char* end;

  Workspace(unsigned char* at, KVKind kind, int64_t head_dim, int64_t num_seqs) : end(at) {
    take(table, Plan::table_length(num_seqs));
    for (Softmax* softmax : {&part, &total}) {
      take(softmax->m, kMaxQueries);
      take(softmax->l, kMaxQueries);
      take(softmax->acc, kMaxQueries * head_dim);
    }
    take(kernel, kernel_scratch_bytes(kind, head_dim));
  }

  static int64_t bytes(KVKind kind, int64_t head_dim, int64_t num_seqs) {
    alignas(64) unsigned char start[64];
    return Workspace(start, kind, head_dim, num_seqs).end - start;
  }

 private:
  template <class T>
  void take(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(end);
    end += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  }
};

struct Call {
  const AttentionShape& shape;
  const KV& kv;
  int64_t layer;
  const AttentionRows* seqs;
  int64_t num_seqs;
  const float* query;
  int64_t query_stride;
  float* out;
};

// What one member of the team does in one call.
template <KVKind kind>
class Member {
 public:
  Member(const Call& call, Team& team, int64_t shared_tokens, unsigned char* scratch)
      : call_(call), head_dim_(call.shape.head_dim), group_(call.shape.num_heads / call.shape.num_kv_heads),
        work_(scratch + team.rank() * Workspace::bytes(kind, head_dim_, call.num_seqs), kind, head_dim_, call.num_seqs),
        plan_(call.shape, call.seqs, call.num_seqs, team.size(), shared_tokens, work_.table),
        partials_(reinterpret_cast<float*>(scratch + team.size() * Workspace::bytes(kind, head_dim_, call.num_seqs))),
        kernel_(call.kv, scoring(), head_dim_, work_.kernel) {}

  void run(Team& team) {
    team.share(plan_.num_items(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run(plan_.item(i));
    });
    if (plan_.num_partials() == 0) return;
    const int64_t heads = call_.shape.num_kv_heads;
    team.share(plan_.num_draft_rows() * heads, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) merge(i / heads, i % heads);
    });
  }

 private:
  struct Row {
    int64_t seq, row;  // in its sequence
    int64_t index;     // in query and out
    int64_t position;
  };

  Scoring scoring() const {
    const float cap = call_.shape.soft_cap;
    return cap == 0.0f ? Scoring{call_.shape.scale * kLog2e, 0.0f} : Scoring{call_.shape.scale / cap, cap * kLog2e};
  }

  void run(const Item& item) {
    set_rows(item);
    if (num_rows_ == 0) return;
    set_queries(item);
    read(call_.seqs[item.seq].blocks, item.splits);
    for_queries([&](const Row& row, int64_t head, int64_t q) {
      kernel_.sort_dimensions(work_.total.acc + q * head_dim_);
      const int64_t place = item.what == Item::What::chunk ? -1 : plan_.partial(row.seq, row.row, item.splits.begin);
      if (place < 0) return finish(row.index, head, q, work_.total);
      deliver(place, head, q);
    });
  }

  void set_rows(const Item& item) {
    num_rows_ = 0;
    for (int64_t row = item.rows.begin; row < item.rows.end; ++row) {
      if (item.what != Item::What::shared) {
        add_row(item.seq, row);
        continue;
      }
      const int64_t seq = plan_.seq_of_draft_row(row);
      const Range splits = plan_.splits_of(call_.seqs[seq]);
      if (item.splits.begin >= splits.begin && item.splits.begin < splits.end) add_row(seq, row - plan_.first_draft_row(seq));
    }
  }

  void add_row(int64_t seq, int64_t row) {
    const AttentionRows& rows = call_.seqs[seq];
    rows_[num_rows_++] = {seq, row, rows.first_row + row, rows.length - rows.num_rows + row};
  }

  void set_queries(const Item& item) {
    queries_.first_head = item.heads.begin;
    queries_.num_heads = item.heads.size();
    queries_.count = num_rows_ * group_;
    queries_.stride = round_up(queries_.count, kQueryStep);
    low_ = INT64_MAX;
    high_ = 0;
    for (int64_t i = 0; i < queries_.stride; ++i) {
      const bool is_query = i < queries_.count;
      const int64_t position = is_query ? rows_[i / group_].position : 0;
      queries_.low[i] = static_cast<int32_t>(Plan::first_seen(call_.shape, position));
      queries_.high[i] = is_query ? static_cast<int32_t>(position + 1) : 0;  // those that fill up see nothing
      if (!is_query) continue;
      low_ = std::min<int64_t>(low_, queries_.low[i]);
      high_ = std::max<int64_t>(high_, queries_.high[i]);
    }
    for_queries([&](const Row& row, int64_t head, int64_t q) {
      queries_.query[q] = call_.query + row.index * call_.query_stride + head * head_dim_;
    });
    kernel_.set_queries(queries_);
    clear(work_.total);
  }

  void clear(const Softmax& softmax) const {
    for (int64_t h = 0; h < queries_.num_heads; ++h) softmax.clear(h * queries_.stride, queries_.count, head_dim_);
  }

  // body(row, query head, number of the query)
  template <class Body>
  void for_queries(const Body& body) {
    for (int64_t h = 0; h < queries_.num_heads; ++h) {
      for (int64_t i = 0; i < queries_.count; ++i) {
        body(rows_[i / group_], (queries_.first_head + h) * group_ + i % group_, h * queries_.stride + i);
      }
    }
  }

  // Brings what the queries see of some splits into their softmax.
  void read(const int32_t* blocks, const Range& splits) {
    const int64_t from = std::max(splits.begin * kSplitTokens, low_), to = std::min(splits.end * kSplitTokens, high_);
    if (from >= to) return;
    KVTile* tile = &tiles_[0];
    KVTile* next = &tiles_[1];
    locate(*tile, blocks, from, to);
    // The first split begins the softmax of all.
    queries_.softmax = work_.total;
    for (int64_t at = from; at < to; std::swap(tile, next)) {
      at = (at / kTileTokens + 1) * kTileTokens;
      if (at < to) locate(*next, blocks, at, to);
      kernel_.add_tile(queries_, *tile, at < to ? next : nullptr);
      if (at % kSplitTokens != 0 && at < to) continue;
      if (queries_.softmax.acc == work_.part.acc) fold_part();
      if (at >= to) break;
      queries_.softmax = work_.part;
      clear(work_.part);
    }
  }

  void locate(KVTile& tile, const int32_t* blocks, int64_t from, int64_t to) {
    const int64_t first = from / kTileTokens * kTileTokens;
    tile.locate(call_.kv, call_.layer, blocks, first, from, std::min(first + kTileTokens, to));
  }

  void fold_part() {
    for (int64_t h = 0; h < queries_.num_heads; ++h) {
      for (int64_t q = h * queries_.stride; q < h * queries_.stride + queries_.count; ++q) {
        const Softmax &total = work_.total, &part = work_.part;
        fold(total.m[q], total.l[q], total.acc + q * head_dim_, part.m[q], part.l[q], part.acc + q * head_dim_, head_dim_);
      }
    }
  }

  // Hands over one query's softmax of one split.
  void deliver(int64_t place, int64_t head, int64_t q) {
    float* partial = partials_ + (place * call_.shape.num_heads + head) * partial_floats(head_dim_);
    std::copy_n(work_.total.acc + q * head_dim_, head_dim_, partial);
    partial[head_dim_] = work_.total.m[q];
    partial[head_dim_ + 1] = work_.total.l[q];
  }

  void finish(int64_t index, int64_t head, int64_t q, const Softmax& softmax) {
    float* out = call_.out + (index * call_.shape.num_heads + head) * head_dim_;
    const Vec share = all(1.0f / softmax.l[q]);
    for (int64_t d = 0; d < head_dim_; d += kLanes) store(out + d, mul(load(softmax.acc + q * head_dim_ + d), share));
  }

  // Folds the splits of one row's queries of one KV head, in their order.
  void merge(int64_t draft_row, int64_t kv_head) {
    const int64_t seq = plan_.seq_of_draft_row(draft_row), row = draft_row - plan_.first_draft_row(seq);
    const Range splits = plan_.splits_of(call_.seqs[seq]);
    if (splits.size() == 1) return;
    const Softmax& total = work_.total;
    for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head) {
      total.clear(0, 1, head_dim_);
      for (int64_t split = splits.begin; split < splits.end; ++split) {
        const int64_t place = plan_.partial(seq, row, split);
        const float* part = partials_ + (place * call_.shape.num_heads + head) * partial_floats(head_dim_);
        fold(total.m[0], total.l[0], total.acc, part[head_dim_], part[head_dim_ + 1], part, head_dim_);
      }
      finish(call_.seqs[seq].first_row + row, head, 0, total);
    }
  }

  Call call_;
  int64_t head_dim_, group_;
  Workspace work_;
  Plan plan_;
  float* partials_;
  Kernel<kind> kernel_;
  Queries queries_;
  KVTile tiles_[2];
  Row rows_[kMaxQueries];
  int64_t num_rows_ = 0, low_ = 0, high_ = 0;
};

template <KVKind kind>
void attend_as(const Call& call, Team& team, int64_t shared_tokens, unsigned char* scratch) {
  Member<kind>(call, team, shared_tokens, scratch).run(team);
}

}  // namespace

int64_t attention_scratch_bytes(const AttentionShape& shape, const KV& kv, const AttentionRows* seqs, int64_t num_seqs,
                                int team_size) {
  int64_t partials = 0;
  for (int64_t s = 0; s < num_seqs; ++s) partials += Plan::num_partials_of(shape, seqs[s]);
  return team_size * Workspace::bytes(kv.kind, shape.head_dim, num_seqs) +
         partials * shape.num_heads * partial_floats(shape.head_dim) * static_cast<int64_t>(sizeof(float));
}

void attend(Team& team, const AttentionShape& shape, const KV& kv, int64_t layer, const AttentionRows* seqs,
            int64_t num_seqs, int64_t shared_blocks, const float* query, int64_t query_stride, float* out,
            unsigned char* scratch) {
  const Call call{shape, kv, layer, seqs, num_seqs, query, query_stride, out};
  const int64_t shared_tokens = shared_blocks * kv.block_size;
  switch (kv.kind) {
    case KVKind::bf16: return attend_as<KVKind::bf16>(call, team, shared_tokens, scratch);
    case KVKind::f16: return attend_as<KVKind::f16>(call, team, shared_tokens, scratch);
    case KVKind::int8: return attend_as<KVKind::int8>(call, team, shared_tokens, scratch);
    case KVKind::fp8: return attend_as<KVKind::fp8>(call, team, shared_tokens, scratch);
    case KVKind::f32: return attend_as<KVKind::f32>(call, team, shared_tokens, scratch);
  }
}

}  // namespace sage
