#include "step.h"

#include <sys/mman.h>
#include <time.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "rows.h"
#include "vectors.h"

namespace sage {
namespace {

// A layer takes the tokens of a step in tiles, so that activations need bounded memory however many tokens there
// are. Tokens attend to earlier ones only, whose KV earlier tiles have stored. Large enough that reading the
// weights once per tile costs little beside multiplying by them.
constexpr int64_t kTileRows = 512;
constexpr int64_t kAlignment = 64;
constexpr int64_t kMostLaps = 14;  // of a layer on a tile, if q, k, v, gate and up are products of their own
constexpr int64_t kBeatInterval = 100'000'000;  // ns: a beat may have to wait for an interpreter's lock

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

// Floats from one row of activations to the next. Rows a multiple of 4 KiB apart would share a few lines of the
// first-level cache, which a product's tiles of 32 rows then take from each other.
int64_t row_stride(int64_t num_floats) { return (num_floats + 15) / 16 * 16 + 16; }

int64_t aligned(int64_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rows [begin, end) of the step's tokens.
struct Tile {
  int64_t begin, end;
  int64_t first_seq, num_seqs;         // in the list of all tiles' sequences
  std::vector<AttentionGroup> groups;  // of these sequences
  int64_t rows() const { return end - begin; }
};

// Cuts the tokens of a step into tiles, and its sequences with them.
class Tiles {
 public:
  Tiles(const SageStep& step, int64_t block_size) : tables_(step.num_seqs * step.table_stride) {
    std::copy_n(step.block_tables, tables_.size(), tables_.begin());
    tiles_.push_back({0, 0, 0, 0, {}});
    for (int64_t seq = 0; seq < step.num_seqs; seq++)
      add(tables_.data() + seq * step.table_stride, step.query_lens[seq], step.seq_lens[seq]);
    for (Tile& tile : tiles_) {
      AttentionRows* seqs = seqs_.data() + tile.first_seq;
      tile.groups = group_by_prefix(seqs, tile.num_seqs, block_size, step.num_threads);
    }
  }

  const std::vector<Tile>& tiles() const { return tiles_; }
  const AttentionRows* seqs_of(const Tile& tile) const { return seqs_.data() + tile.first_seq; }

 private:
  void add(const int32_t* blocks, int64_t num_rows, int64_t length) {
    for (int64_t done = 0; done < num_rows;) {
      if (tiles_.back().rows() == kTileRows) open();
      Tile& tile = tiles_.back();
      const int64_t taken = std::min(num_rows - done, kTileRows - tile.rows());
      seqs_.push_back({blocks, tile.rows(), taken, length - num_rows + done + taken});
      tile.end += taken;
      tile.num_seqs++;
      done += taken;
    }
  }

  void open() {
    const int64_t begin = tiles_.back().end;
    tiles_.push_back({begin, begin, static_cast<int64_t>(seqs_.size()), 0, {}});
  }

  std::vector<int32_t> tables_;
  std::vector<AttentionRows> seqs_;  // first_row counts from the tile's begin
  std::vector<Tile> tiles_;
};

// Where the activations of a step lie, all float32 but `input`.
struct Activations {
  float* residual;       // (tokens, hidden)
  float* qkv;            // (tile, (heads + 2 kv_heads) * head_dim), and the MLP's hidden state after attention
  float* attended;       // (tile, heads * head_dim)
  float* normed;         // (tile, hidden), where norms are apart from what follows
  float* rows;           // two for each member, as long as a product's input
  unsigned char* input;  // of the product that comes next
  unsigned char* attention;
};

}  // namespace

Weight as_weight(const SageLinear& linear) {
  return {static_cast<WeightKind>(linear.kind), linear.is_gated != 0, linear.n, linear.k, linear.group,
          linear.data, linear.bias,
          {static_cast<Code>(linear.code), linear.has_half_scales != 0, linear.has_zeros != 0, linear.has_offsets != 0,
           linear.is_unsigned != 0, linear.scale_group}};
}

CodedRows as_rows(const SageCodedRows& rows) {
  return {static_cast<const unsigned char*>(rows.codes), rows.scales, static_cast<const int8_t*>(rows.zeros), rows.offsets,
          static_cast<const uint16_t*>(rows.factors), static_cast<const uint16_t*>(rows.offset_factors)};
}

void Scratch::Free::operator()(unsigned char* memory) const { std::free(memory); }

unsigned char* Scratch::take(int64_t num_bytes) {
  if (num_bytes <= num_bytes_) return memory_.get();
  constexpr int64_t kHugePage = 2 << 20;
  num_bytes = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
  memory_.reset();
  num_bytes_ = 0;
  memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(kHugePage, num_bytes)));
  if (memory_ == nullptr) throw std::bad_alloc();
  madvise(memory_.get(), num_bytes, MADV_HUGEPAGE);
  num_bytes_ = num_bytes;
  return memory_.get();
}

Model::Model(const SageModel& table) : table_(table), layers_(table.layers, table.layers + table.num_layers) {
  table_.layers = layers_.data();
}

// One member's way through a step.
class Walk {
 public:
  Walk(Model& model, const SageStep& step, const Tiles& tiles, const Activations& at, Team& team)
      : model_(model), table_(model.table_), step_(step), tiles_(tiles), at_(at), team_(team),
        laps_(team.rank() == 0 && model.is_timed_ ? &model.laps_ : nullptr),
        row_(at.rows + 2 * team.rank() * row_floats(model)), changed_(row_ + row_floats(model)) {
    end_of(SAGE_BEGIN);
  }

  static int64_t row_floats(const Model& model) {
    int64_t widest = model.table_.hidden;
    for (const SageLayer& layer : model.layers_) widest = std::max({widest, layer.output.k, layer.down.k});
    return aligned(widest * sizeof(float)) / sizeof(float);
  }

  void run() {
    embed();
    for (int64_t layer = 0; layer < table_.num_layers; layer++) {
      write_hidden(layer);
      for (const Tile& tile : tiles_.tiles()) {
        beat();
        run_layer(layer, tile);
      }
    }
    write_hidden(table_.num_layers);
    run_head();
  }

 private:
  void beat() {
    if (team_.rank() != 0 || model_.beat_ == nullptr) return;
    const int64_t now = now_ns();
    if (now - model_.last_beat_ns_ < kBeatInterval) return;
    model_.last_beat_ns_ = now;
    model_.beat_();
  }

  void end_of(int operation) {
    if (laps_ != nullptr) laps_->push_back({operation, now_ns()});
  }

  void embed() {
    const int64_t hidden = table_.hidden;
    const Weight head = as_weight(table_.head);
    team_.share(step_.num_tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; token++)
        embed_one(head, step_.input_ids[token], at_.residual + token * row_stride(hidden));
    });
    end_of(SAGE_EMBED);
  }

  void embed_one(const Weight& head, int64_t id, float* out) const {
    const int64_t hidden = table_.hidden;
    if (table_.embedding == nullptr) {
      unpack_row(table_.embedding_codes.n > 0 ? as_weight(table_.embedding_codes) : head, id, out);
    } else if (table_.embedding_kind == SAGE_STORED_F32) {
      std::memcpy(out, static_cast<const float*>(table_.embedding) + id * hidden, hidden * sizeof(float));
    } else {
      const uint16_t* row = static_cast<const uint16_t*>(table_.embedding) + id * hidden;
      for (int64_t i = 0; i < hidden; i++) out[i] = from_bf16(row[i]);
    }
  }

  // Writes the hidden states that are wanted of the layer before this one; before the head, those that it is given.
  void write_hidden(int64_t layer) {
    const int64_t* end = step_.hidden_layers + step_.num_hidden_layers;
    const int64_t* found = std::find(step_.hidden_layers, end, layer);
    if (found == end) return;
    const int64_t hidden = table_.hidden;
    float* out = step_.hidden + (found - step_.hidden_layers) * step_.num_hidden_rows * hidden;
    team_.share(step_.num_hidden_rows, 1, [&](int64_t begin, int64_t end_row) {
      for (int64_t row = begin; row < end_row; row++) {
        const float* x = at_.residual + step_.hidden_rows[row] * row_stride(hidden);
        if (layer == table_.num_layers)
          rms_norm(x, table_.norm.weight, table_.norm.eps, hidden, out + row * hidden);
        else
          std::memcpy(out + row * hidden, x, hidden * sizeof(float));
      }
    });
  }

  void run_layer(int64_t index, const Tile& tile) {
    const SageLayer& layer = model_.layers_[index];
    float* residual = at_.residual + tile.begin * row_stride(table_.hidden);
    const int64_t rows = tile.rows();

    float* out = at_.qkv;
    for (const SageLinear& part : layer.qkv) {
      if (part.n == 0) continue;
      multiply_normed(part, layer.input_norm, residual, rows, out, qkv_stride(), SAGE_QKV);
      out += part.n;
    }
    rotate_and_store(layer, index, tile);
    attend(layer, index, tile);
    add_product(layer.output, at_.attended, table_.num_heads * table_.head_dim, rows, residual, SAGE_OUTPUT);
    feed_forward(layer, rows, residual);
  }

  Input input_of(const SageLinear& linear, int64_t rows) const { return input_of(linear, rows, at_.input); }
  static Input input_of(const SageLinear& linear, int64_t rows, unsigned char* memory) {
    return {static_cast<WeightKind>(linear.kind), rows, linear.k, linear.group, memory, linear.has_one_scale != 0};
  }

  // Sets a row of a product's input, in the order of its columns and rounded as its weights want it.
  void set_input(const SageLinear& linear, const Input& input, int64_t row, const float* x) {
    if (linear.order != nullptr) {
      for (int64_t i = 0; i < linear.k; i++) changed_[i] = x[linear.order[i]];
      x = changed_;
    }
    if (linear.input_code != 0) {
      round_row({static_cast<Code>(linear.input_code), linear.input_group, linear.input_scale}, x, linear.k, changed_);
      x = changed_;
    }
    set_input_row(input, row, x);
  }

  Input normed_input(const SageLinear& linear, const SageNorm& norm, const float* x, int64_t rows) {
    const Input input = input_of(linear, rows);
    const bool is_separate = table_.has_separate_norms != 0;
    const int64_t stride = row_stride(linear.k);
    team_.share(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        float* normed = is_separate ? at_.normed + row * stride : row_;
        rms_norm(x + row * stride, norm.weight, norm.eps, linear.k, normed);
        if (!is_separate) set_input(linear, input, row, normed);
      }
    });
    if (is_separate) set_inputs(linear, input, at_.normed, stride);
    end_of(SAGE_NORM);
    return input;
  }

  void set_inputs(const SageLinear& linear, const Input& input, const float* x, int64_t stride) {
    team_.share(input.rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) set_input(linear, input, row, x + row * stride);
    });
  }

  void multiply_normed(const SageLinear& linear, const SageNorm& norm, const float* x, int64_t rows, float* out,
                       int64_t stride, int operation) {
    const Input input = normed_input(linear, norm, x, rows);
    multiply(team_, as_weight(linear), input, Into::store, out, stride);
    end_of(operation);
  }

  // silu(gate) * up, which are two products.
  void feed_apart(const SageLayer& layer, int64_t rows, float* residual) {
    const int64_t width = layer.down.k, stride = row_stride(width);
    float* up = at_.qkv + rows * stride;
    multiply_normed(layer.gate_up, layer.forward_norm, residual, rows, at_.qkv, stride, SAGE_GATE_UP);
    multiply_normed(layer.up, layer.forward_norm, residual, rows, up, stride, SAGE_GATE_UP);
    team_.share(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        float* gate = at_.qkv + row * stride;
        for (int64_t i = 0; i < width; i += kLanes)
          store(gate + i, mul(silu(load(gate + i, width - i)), load(up + row * stride + i, width - i)));
      }
    });
    add_product(layer.down, at_.qkv, stride, rows, residual, SAGE_DOWN);
  }

  void feed_forward(const SageLayer& layer, int64_t rows, float* residual) {
    if (layer.up.n > 0) return feed_apart(layer, rows, residual);
    const Weight gate_up = as_weight(layer.gate_up);
    const bool is_changed = layer.down.order != nullptr || layer.down.input_code != 0;
    if (is_changed || !can_feed(gate_up, static_cast<WeightKind>(layer.down.kind))) {
      multiply_normed(layer.gate_up, layer.forward_norm, residual, rows, at_.qkv, row_stride(layer.down.k), SAGE_GATE_UP);
      add_product(layer.down, at_.qkv, row_stride(layer.down.k), rows, residual, SAGE_DOWN);
      return;
    }
    const Input input = normed_input(layer.gate_up, layer.forward_norm, residual, rows);
    const Input hidden = input_of(layer.down, rows, reinterpret_cast<unsigned char*>(at_.qkv));
    multiply_into_input(team_, gate_up, input, hidden);
    end_of(SAGE_GATE_UP);
    multiply(team_, as_weight(layer.down), hidden, Into::add, residual, row_stride(layer.down.n));
    end_of(SAGE_DOWN);
  }

  // Adds the product of `x`, `stride` floats from row to row, to the residual.
  void add_product(const SageLinear& linear, const float* x, int64_t stride, int64_t rows, float* residual, int operation) {
    const Input input = input_of(linear, rows);
    set_inputs(linear, input, x, stride);
    multiply(team_, as_weight(linear), input, Into::add, residual, row_stride(linear.n));
    end_of(operation);
  }

  // Norms and rotates queries and keys, and writes the tile's KV. One piece of work is a token's KV head with the
  // query heads that share it.
  void rotate_and_store(const SageLayer& layer, int64_t index, const Tile& tile) {
    const int64_t num_kv_heads = table_.num_kv_heads;
    const bool is_separate = table_.has_separate_stores != 0;
    const auto each_head = [&](const auto& body) {
      team_.share(tile.rows() * num_kv_heads, num_kv_heads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) body(i / num_kv_heads, i % num_kv_heads);
      });
    };
    each_head([&](int64_t row, int64_t kv_head) {
      rotate_heads(layer, tile.begin + row, row, kv_head);
      if (!is_separate) store_head(index, tile.begin + row, row, kv_head);
    });
    if (is_separate) each_head([&](int64_t row, int64_t kv_head) { store_head(index, tile.begin + row, row, kv_head); });
    end_of(SAGE_ROPE);
  }

  float* key_at(int64_t row, int64_t kv_head) const {
    return at_.qkv + row * qkv_stride() + (table_.num_heads + kv_head) * table_.head_dim;
  }

  void rotate_heads(const SageLayer& layer, int64_t token, int64_t row, int64_t kv_head) {
    const int64_t dim = table_.head_dim, group = table_.num_heads / table_.num_kv_heads;
    float* heads = at_.qkv + row * qkv_stride();
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      turn(layer, layer.query_norm, step_.positions[token], heads + head * dim);
    turn(layer, layer.key_norm, step_.positions[token], key_at(row, kv_head));
  }

  void store_head(int64_t index, int64_t token, int64_t row, int64_t kv_head) {
    const float* key = key_at(row, kv_head);
    store_kv(model_.kv_, index, kv_head, table_.head_dim, step_.slots[token], key,
             key + table_.num_kv_heads * table_.head_dim);
  }

  int64_t qkv_stride() const { return row_stride((table_.num_heads + 2 * table_.num_kv_heads) * table_.head_dim); }

  void turn(const SageLayer& layer, const SageNorm& norm, int64_t position, float* head) const {
    const int64_t half = layer.rotary_dim / 2;
    if (norm.weight != nullptr) rms_norm(head, norm.weight, norm.eps, table_.head_dim, head);
    rotate(head, layer.cos + position * half, layer.sin + position * half, half);
  }

  void attend(const SageLayer& layer, int64_t index, const Tile& tile) {
    const AttentionShape shape = {table_.num_heads, table_.num_kv_heads, table_.head_dim, layer.scale,
                                  layer.window, layer.soft_cap};
    for (const AttentionGroup& group : tile.groups)
      sage::attend(team_, shape, model_.kv_, index, tiles_.seqs_of(tile) + group.begin, group.end - group.begin,
                   group.shared_blocks, at_.qkv, qkv_stride(), at_.attended, at_.attention);
    end_of(SAGE_ATTEND);
  }

  void run_head() {
    const int64_t hidden = table_.hidden;
    const Weight weight = as_weight(table_.head);
    for (int64_t first = 0; first < step_.num_wanted; first += kTileRows) {
      beat();
      const int64_t rows = std::min(kTileRows, step_.num_wanted - first);
      const Input input = input_of(table_.head, rows);
      team_.share(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
          const float* x = at_.residual + step_.wanted[first + row] * row_stride(hidden);
          rms_norm(x, table_.norm.weight, table_.norm.eps, hidden, row_);
          set_input(table_.head, input, row, row_);
        }
      });
      multiply(team_, weight, input, Into::store, step_.logits + first * table_.vocab, table_.vocab);
    }
    end_of(SAGE_HEAD);
  }

  Model& model_;
  const SageModel& table_;
  const SageStep& step_;
  const Tiles& tiles_;
  const Activations& at_;
  Team& team_;
  std::vector<SageLap>* laps_;  // rank 0 alone measures, from barrier to barrier; with room for all
  float *row_, *changed_;
};

namespace {

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer reports who touches what lies between two pieces.
constexpr int64_t kGap = kAlignment;
void allow(unsigned char* memory, int64_t num_bytes) { __asan_unpoison_memory_region(memory, num_bytes); }
void forbid(unsigned char* memory, int64_t num_bytes) { __asan_poison_memory_region(memory, num_bytes); }
#else
constexpr int64_t kGap = 0;
void allow(unsigned char*, int64_t) {}
void forbid(unsigned char*, int64_t) {}
#endif

// Gives out one piece of memory after the other; without memory it only counts.
class Layout {
 public:
  explicit Layout(unsigned char* memory) : memory_(memory) {}

  unsigned char* bytes(int64_t num_bytes) {
    unsigned char* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    const int64_t end = used_ + num_bytes, next = aligned(num_bytes) + used_ + kGap;
    if (memory_ != nullptr) {
      allow(piece, num_bytes);
      forbid(memory_ + end, next - end);
    }
    used_ = next;
    return piece;
  }
  float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * sizeof(float))); }
  int64_t used() const { return used_; }

 private:
  unsigned char* memory_;
  int64_t used_ = 0;
};

// What a step needs at most, apart from the number of its tokens.
struct Needs {
  int64_t qkv_floats = 0;   // per row, or
  int64_t qkv_bytes = 0;    // in all
  int64_t input_bytes = 0;  // for all rows of a tile
  int64_t attention_bytes = 0;
};

}  // namespace

static void need_input(Needs& needs, const SageLinear& linear, int64_t rows) {
  const int64_t num_bytes = input_bytes(static_cast<WeightKind>(linear.kind), rows, linear.k, linear.group);
  needs.input_bytes = std::max(needs.input_bytes, num_bytes);
}

static Activations place(Layout& layout, const Needs& needs, const SageModel& table, const SageStep& step,
                         int64_t tile_rows, int64_t row_floats) {
  Activations at;
  at.residual = layout.floats(step.num_tokens * row_stride(table.hidden));
  at.qkv = layout.floats(std::max(tile_rows * needs.qkv_floats, needs.qkv_bytes / 4 + 16));
  at.attended = layout.floats(tile_rows * table.num_heads * table.head_dim);
  at.normed = table.has_separate_norms != 0 ? layout.floats(tile_rows * row_stride(table.hidden)) : nullptr;
  at.rows = layout.floats(2 * step.num_threads * row_floats);
  at.input = layout.bytes(needs.input_bytes);
  at.attention = layout.bytes(needs.attention_bytes);
  return at;
}

void Model::step(const SageStep& step) {
  const Tiles tiles(step, kv_.block_size);
  const int64_t tile_rows = std::min(kTileRows, step.num_tokens);
  Needs needs;
  for (const SageLayer& layer : layers_) {
    const int64_t qkv_outputs = (table_.num_heads + 2 * table_.num_kv_heads) * table_.head_dim;
    const int64_t gate_floats = layer.up.n > 0 ? 2 * row_stride(layer.down.k) : row_stride(layer.gate_up.n / 2);
    needs.qkv_floats = std::max({needs.qkv_floats, row_stride(qkv_outputs), gate_floats});
    const int64_t hidden = input_bytes(static_cast<WeightKind>(layer.down.kind), tile_rows, layer.down.k, layer.down.group);
    needs.qkv_bytes = std::max<int64_t>(needs.qkv_bytes, hidden);
    for (const SageLinear* linear : {&layer.qkv[0], &layer.qkv[1], &layer.qkv[2], &layer.output, &layer.gate_up,
                                     &layer.up, &layer.down})
      if (linear->n > 0) need_input(needs, *linear, tile_rows);
    const AttentionShape shape = {table_.num_heads, table_.num_kv_heads, table_.head_dim, layer.scale,
                                  layer.window, layer.soft_cap};
    if (&layer != layers_.data() && layer.window == layers_[0].window) continue;  // as the first layer's
    for (const Tile& tile : tiles.tiles())
      needs.attention_bytes =
          std::max(needs.attention_bytes, attention_scratch_bytes(shape, kv_, tiles.seqs_of(tile), tile.num_seqs,
                                                                  step.num_threads));
  }
  need_input(needs, table_.head, std::min(kTileRows, step.num_wanted));

  const int64_t row_floats = Walk::row_floats(*this);
  Layout sizes(nullptr);
  place(sizes, needs, table_, step, tile_rows, row_floats);
  Layout layout(scratch_.take(sizes.used()));
  const Activations at = place(layout, needs, table_, step, tile_rows, row_floats);
  laps_.clear();
  if (is_timed_) laps_.reserve(3 + kMostLaps * layers_.size() * tiles.tiles().size());
  run_team(step.num_threads, [&](Team& team) { Walk(*this, step, tiles, at, team).run(); });
}

}  // namespace sage
