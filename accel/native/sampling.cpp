#include "sampling.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>

#include "vectors.h"

namespace sage {
namespace {

constexpr int64_t kBlock = 128;  // neighbours whose largest logit is kept; a multiple of the lanes
constexpr int64_t kStretch = 4 * kBlock;  // neighbours whose weights are added up together
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kBinaryLog = 1.4426950408889634;  // of e
constexpr double kDeepest = -125.5;                // 2 to anything less is taken for 0
constexpr int64_t kMembersPerRow = 8;              // from so many on, all members choose a row's token together
constexpr int kMostEdges = 5;
constexpr int64_t kAhead = 1024;  // logits: the processor's own prefetching ends with each page of memory

int64_t num_blocks_of(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }
int64_t num_stretches_of(int64_t vocab) { return (vocab + kStretch - 1) / kStretch; }

// 2 to an exponent from kDeepest to 0, within 3e-7 of its size and exactly 1 at 0. Anything for other exponents.
inline Vec power(Vec exponent) {
  const Vec whole = round(exponent);
  const Vec rest = sub(exponent, whole);
  Vec p = all(1.326472615e-3f);
  p = fma(p, rest, all(9.671512991e-3f));
  p = fma(p, rest, all(5.550733581e-2f));
  p = fma(p, rest, all(2.402224243e-1f));
  p = fma(p, rest, all(6.931470037e-1f));
  p = fma(p, rest, all(1.0f));
  return times_power_of_two(p, whole);
}

// The lowest of the largest tokens that top-p keeps, in the order of their logits; of equal ones, those with the
// higher ids come first.
struct Cut {
  float value;
  int32_t id;
};

// Logits between which top-p's border may lie, falling.
struct Edges {
  std::array<float, kMostEdges> at;
  int count = 0;
};

// What the members that choose a row's token know of it. A token's weight is e to the difference of its logit from
// the largest, divided by the temperature.
struct Row {
  const float* logits;
  const float* next_logits;  // of the row that the same members read after this one; their own if there is none
  int64_t vocab;
  SageDrawSettings settings;
  const float* given;          // `logits`, or what they are made from
  const uint32_t* mask;        // null: all tokens may be drawn
  const SageEdit *edits, *edits_end;
  float* changed;              // room for changed logits

  float* maxima;                // of each block
  // For each stretch: the weight of what is at least each edge and, last, of all that top-k and min-p keep.
  double* sums[kMostEdges + 1];
  // Entries among which top-p's border lies, rising in id.
  int32_t* open_ids;
  float* open_logits;
  float* open_weights;
  int64_t num_open;
  int32_t* border_places;  // of those that are sorted

  bool is_random;
  float largest;
  float exponent_scale;  // of 2, for differences of logits
  float floor;           // top-k and min-p keep nothing below
  Edges edges;
  float low, high;  // top-p keeps what is at least `high` and nothing below `low`
  double total;
};

// Gives out one piece of memory after the other; without memory it only counts.
class Memory {
 public:
  explicit Memory(unsigned char* memory) : memory_(memory) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* memory_;
  int64_t used_ = 0;
};

// Lays a row out in the memory; returns the size of it.
int64_t place(unsigned char* at, int64_t vocab) {
  const int64_t entries = num_blocks_of(vocab) * kBlock + kLanes;  // whole lanes are stored beyond the last one
  Memory memory(at);
  Row* row = memory.take<Row>(1);
  Row parts{};
  parts.vocab = vocab;
  parts.changed = memory.take<float>(entries);
  parts.maxima = memory.take<float>(num_blocks_of(vocab));
  for (double*& sums : parts.sums) sums = memory.take<double>(num_stretches_of(vocab));
  parts.open_logits = memory.take<float>(entries);
  parts.open_weights = memory.take<float>(entries);
  parts.open_ids = memory.take<int32_t>(entries);
  parts.border_places = memory.take<int32_t>(entries);
  if (row != nullptr) *row = parts;
  return memory.used();
}

// Where top-p's border probably lies, from a histogram over the depth below the largest logit.
class Forecast {
 public:
  Forecast(float largest, float depth) : largest_(largest), bins_per_depth_(kBins / std::max(depth, 1e-30f)) {}

  // Counts an entry that stands for so many.
  void count(float logit, float weight, float times) {
    const int bin = static_cast<int>(std::min((largest_ - logit) * bins_per_depth_, kBins - 1.0f));
    mass_[bin] += weight * times;
    if (times > 1) variance_[bin] += weight * times * weight * times;
  }

  // Edges that lie closer together where the border is more probable.
  Edges edges(double dropped_share) const {
    constexpr double kDeviations[kMostEdges] = {-2.5, -0.7, 0, 0.7, 2.5};
    double total = 0, variance = 0;
    for (int bin = 0; bin < kBins; bin++) total += mass_[bin], variance += variance_[bin];
    const double target = (1 - dropped_share) * total;
    double above = 0, variance_above = 0;
    for (int bin = 0; bin < kBins && above < target; bin++) above += mass_[bin], variance_above += variance_[bin];
    const double deviation = std::sqrt(dropped_share * dropped_share * variance_above +
                                       (1 - dropped_share) * (1 - dropped_share) * (variance - variance_above));
    Edges edges;
    int bin = 0;
    above = 0;
    for (const double deviations : kDeviations) {
      const double mass = target + deviations * deviation;
      if (mass <= 0) continue;
      while (bin < kBins && above + mass_[bin] < mass) above += mass_[bin++];
      if (bin == kBins) break;
      edges.at[edges.count++] = value_at(bin + (mass - above) / std::max(mass_[bin], FLT_MIN));
    }
    return edges;
  }

 private:
  static constexpr int kBins = 512;

  float value_at(double bin) const { return largest_ - static_cast<float>(bin) / bins_per_depth_; }

  float largest_, bins_per_depth_;
  float mass_[kBins] = {}, variance_[kBins] = {};
};

// One member's part in choosing a row's token.
class Choice {
 public:
  Choice(Team& team, Row& row)
      : team_(team), row_(row), num_blocks_(num_blocks_of(row.vocab)), num_stretches_(num_stretches_of(row.vocab)) {}

  // Returns the token to rank 0, and 0 to others.
  int64_t run() {
    if (row_.logits == row_.changed) change();
    team_.share(num_blocks_, kGrain, [&](int64_t begin, int64_t end) { find_maxima(begin, end); });
    int64_t token = 0;
    alone([&] { token = begin(); });
    if (!row_.is_random) return token;
    team_.share(num_stretches_, kGrain, [&](int64_t begin, int64_t end) {
      row_.edges.count == 0 ? weigh<0>(begin, end) : weigh<kMostEdges>(begin, end);
    });
    alone([&] { token = row_.settings.dropped_share < 0 ? draw_from_all() : draw_with_top_p(); });
    return token;
  }

  // Writes log-probabilities of the given logits: what SageDraw says of a row's.
  void report(int64_t token, int64_t num_top, double* out, int64_t most_top) {
    if (row_.logits != row_.given) {
      row_.logits = row_.given;
      find_maxima(0, num_blocks_);
    }
    std::fill_n(out, 2 + 2 * most_top, 0.0);
    out[0] = NAN;
    row_.largest = -kInfinity;
    for (int64_t b = 0; b < num_blocks_; b++) {
      if (std::isnan(row_.maxima[b])) return;
      row_.largest = std::max(row_.largest, row_.maxima[b]);
    }
    if (!std::isfinite(row_.largest) || token < 0) return;
    const Totals totals = add_up(row_.logits[token]);
    const double partition = row_.largest + std::log(totals.weight);
    out[0] = row_.logits[token] - partition;
    out[1] = static_cast<double>(totals.num_reaching);
    find_top(std::min(num_top, row_.vocab));
    for (int64_t i = 0; i < std::min(num_top, row_.vocab); i++) {
      const int32_t id = row_.border_places[i];
      out[2 + i] = row_.logits[id] - partition;
      out[2 + most_top + i] = id;
    }
  }

 private:
  static constexpr int64_t kGrain = 32;
  static constexpr int kBins = 1024;

  template <typename Body>
  void alone(const Body& body) {
    if (team_.rank() == 0) body();
    team_.barrier();
  }

  // Makes the changed logits.
  void change() {
    team_.share(num_blocks_, kGrain, [&](int64_t begin, int64_t end) { copy_allowed(begin, end); });
    alone([&] {
      for (const SageEdit* edit = row_.edits; edit != row_.edits_end; edit++) {
        if (edit->token < 0 || edit->token >= row_.vocab) continue;
        float& logit = row_.changed[edit->token];
        if (edit->addend == -kInfinity) {
          logit = -kInfinity;
          continue;
        }
        if (edit->factor != 1) logit = logit < 0 ? logit * edit->factor : logit / edit->factor;
        logit += edit->addend;
      }
    });
  }

  void copy_allowed(int64_t begin_block, int64_t end_block) {
    const int64_t begin = begin_block * kBlock, end = std::min(end_block * kBlock, row_.vocab);
    if (row_.mask == nullptr) {
      std::copy(row_.given + begin, row_.given + end, row_.changed + begin);
      return;
    }
    const Vec forbidden = all(-kInfinity);
    for (int64_t i = begin; i < end; i += kLanes) {
      const Mask allowed = lanes_of(row_.mask[i / 32] >> (i % 32));
      const Vec logits = end - i >= kLanes ? load(row_.given + i) : load(row_.given + i, end - i);
      store(row_.changed + i, pick(allowed, logits, forbidden));  // there is room for whole lanes
    }
  }

  struct Totals {
    double weight;         // of all tokens, where the largest logit's is 1
    int64_t num_reaching;  // a logit
  };

  Totals add_up(float logit) const {
    alignas(64) float padded[kStretch];
    Totals totals = {0, 0};
    DoubleSum sum;
    const Vec scale = all(static_cast<float>(kBinaryLog)), deepest = all(static_cast<float>(kDeepest));
    for (int64_t stretch = 0; stretch < num_stretches_; stretch++) {
      const float* x = logits_from(stretch * kStretch, kStretch, padded);
      for (int64_t i = 0; i < kStretch; i += kLanes) {
        const Vec logits = load(x + i);
        const Vec exponent = mul(sub(logits, all(row_.largest)), scale);
        sum.add(only(at_least(exponent, deepest), power(max(exponent, deepest))));
        totals.num_reaching += count(at_least(logits, all(logit)));
      }
    }
    totals.weight = sum.total();
    if (logit == -kInfinity) totals.num_reaching = row_.vocab;  // without what is behind the last token
    return totals;
  }

  // Puts the ids of the largest logits first among the places, best first and equal ones by id.
  void find_top(int64_t num_top) {
    if (num_top == 0) return;
    const float border = kth_largest(num_top);
    int32_t* end = row_.border_places;
    alignas(64) float padded[kBlock];
    for (int64_t block = 0; block < num_blocks_; block++) {
      if (row_.maxima[block] < border) continue;
      const float* x = logits_from(block * kBlock, kBlock, padded);
      const int64_t size = std::min(kBlock, row_.vocab - block * kBlock);
      for (int64_t i = 0; i < size; i++)
        if (x[i] >= border) *end++ = static_cast<int32_t>(block * kBlock + i);
    }
    const float* logits = row_.logits;
    std::partial_sort(row_.border_places, row_.border_places + num_top, end, [&](int32_t a, int32_t b) {
      return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
  }

  // Logits from `begin` on; the row's last ones in `padded`, followed by -inf, if there are fewer than `size`.
  const float* logits_from(int64_t begin, int64_t size, float* padded) const {
    const float* logits = row_.logits + begin;
    const int64_t count = row_.vocab - begin;
    if (count >= size) return logits;
    std::fill(std::copy_n(logits, std::max<int64_t>(count, 0), padded), padded + size, -kInfinity);
    return padded;
  }

  // The maximum of each block; NaN if it holds one.
  void find_maxima(int64_t begin, int64_t end) {
    alignas(64) float padded[kBlock];
    for (int64_t block = begin; block < end; block++) {
      const float* x = logits_from(block * kBlock, kBlock, padded);
      Vec most = all(-kInfinity);
      Mask has_nan = no_lanes();
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Vec logits = load(x + i);
        prefetch(x + i + kAhead);
        most = max(most, logits);
        has_nan = either(has_nan, is_nan(logits));
      }
      row_.maxima[block] = any(has_nan) ? NAN : maximum(most);
    }
  }

  Vec weights(Vec logits) const {
    return power(mul(sub(logits, all(row_.largest)), all(row_.exponent_scale)));
  }

  // Chooses the largest logit if the row asks for it, or prepares the draw.
  int64_t begin() {
    row_.is_random = false;
    row_.largest = -kInfinity;
    for (int64_t b = 0; b < num_blocks_; b++) {
      if (std::isnan(row_.maxima[b])) return -1;
      row_.largest = std::max(row_.largest, row_.maxima[b]);
    }
    if (!std::isfinite(row_.largest)) return -1;
    if (row_.settings.temperature == 0) return first_largest();
    const auto temperature = static_cast<float>(row_.settings.temperature);
    if (!std::isfinite(row_.largest / temperature)) return -1;
    row_.is_random = true;
    row_.exponent_scale = static_cast<float>(std::min<double>(kBinaryLog / temperature, FLT_MAX));
    find_floor(temperature);
    row_.edges.count = 0;
    // What top-k keeps is little.
    if (row_.settings.dropped_share >= 0 && !has_top_k()) forecast_border();
    return 0;
  }

  template <typename Body>
  static void for_each_vector(int64_t size, const Body& body) {
    for (int64_t i = 0; i < size; i += kLanes) body(i, std::min(kLanes, size - i));
  }

  int64_t first_largest() const {
    const float* maxima = row_.maxima;
    const int64_t block = std::find(maxima, maxima + num_blocks_, row_.largest) - maxima;
    return std::find(row_.logits + block * kBlock, row_.logits + row_.vocab, row_.largest) - row_.logits;
  }

  bool has_top_k() const { return row_.settings.top_k > 0 && row_.settings.top_k < static_cast<double>(row_.vocab); }

  // Finds the least logit that top-k and min-p keep and that weighs anything.
  void find_floor(double temperature) {
    const double min_p = row_.settings.min_p;
    const double deepest = std::max(min_p > 0 ? std::log(min_p) : -kInfinity, kDeepest / kBinaryLog);
    row_.floor = std::max(static_cast<float>(row_.largest + deepest * temperature), -FLT_MAX);
    if (has_top_k()) row_.floor = std::max(row_.floor, kth_largest(static_cast<int64_t>(row_.settings.top_k)));
  }

  // At least k entries are no smaller than the k-th largest maximum of a block.
  float kth_largest(int64_t k) {
    float* found = row_.open_logits;
    float border = -kInfinity;
    if (k <= num_blocks_) {
      std::copy_n(row_.maxima, num_blocks_, found);
      std::nth_element(found, found + k - 1, found + num_blocks_, std::greater<float>());
      border = found[k - 1];
    }
    int64_t num_found = 0;
    alignas(64) float padded[kBlock];
    for (int64_t block = 0; block < num_blocks_; block++) {
      if (row_.maxima[block] < border) continue;
      const float* x = logits_from(block * kBlock, kBlock, padded);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Vec logits = load(x + i);
        const Mask is_large = at_least(logits, all(border));
        store_masked(found + num_found, is_large, logits);
        num_found += count(is_large);
      }
    }
    std::nth_element(found, found + k - 1, found + num_found, std::greater<float>());
    return found[k - 1];
  }

  // Counts the largest entry of each block, and one of the others for all of them.
  void forecast_border() {
    float* logits = row_.open_logits;
    for (int64_t block = 0; block < num_blocks_; block++) {
      const int64_t size = std::min(kBlock, row_.vocab - block * kBlock);
      logits[block] = row_.logits[block * kBlock + block * 53 % size];
    }
    float* weights = row_.open_weights;
    float* weights_of_maxima = weights + (num_blocks_ + kLanes - 1) / kLanes * kLanes;
    for_each_vector(num_blocks_, [&](int64_t i, int64_t count) {
      store(weights + i, this->weights(load(logits + i, count)), count);
      store(weights_of_maxima + i, this->weights(load(row_.maxima + i, count)), count);
    });
    Forecast forecast(row_.largest, row_.largest - smallest_above_floor(logits));
    for (int64_t block = 0; block < num_blocks_; block++) {
      const float most = row_.maxima[block], other = logits[block];
      if (most >= row_.floor) forecast.count(most, weights_of_maxima[block], 1);
      if (other < row_.floor || other == most) continue;
      forecast.count(other, weights[block], static_cast<float>(std::min(kBlock, row_.vocab - block * kBlock) - 1));
    }
    row_.edges = forecast.edges(row_.settings.dropped_share);
    // So that `weigh` always compares with as many.
    float last = row_.largest;
    for (int i = 0; i < kMostEdges; i++) {
      if (i < row_.edges.count) last = std::max(std::min(last, row_.edges.at[i]), row_.floor);
      row_.edges.at[i] = last;
    }
    row_.edges.count = kMostEdges;
  }

  float smallest_above_floor(const float* logits) const {
    const float floor = std::max(row_.floor, row_.largest - kForecastDepth / row_.exponent_scale);
    float smallest = row_.largest;
    for (int64_t block = 0; block < num_blocks_; block++) smallest = std::min(smallest, std::max(logits[block], floor));
    return smallest;
  }

  // Adds up the weights of stretches: of all entries, and of those that are at least each edge.
  template <int kEdges>
  void weigh(int64_t begin, int64_t end) {
    alignas(64) float padded[kStretch];
    const Vec floor = all(row_.floor);
    for (int64_t stretch = begin; stretch < end; stretch++) {
      Vec sums[kEdges + 1];
      for (Vec& sum : sums) sum = zero();
      if (is_above_floor(stretch)) {
        const float* x = logits_from(stretch * kStretch, kStretch, padded);
        const float* next = row_.next_logits + stretch * kStretch;
        for (int64_t i = 0; i < kStretch; i += kLanes) {
          prefetch_far(next + i);  // memory rests while weights are computed
          const Vec logits = load(x + i), each = weights(logits);
          sums[kEdges] = add_where(at_least(logits, floor), sums[kEdges], each);
          for (int edge = 0; edge < kEdges; edge++)
            sums[edge] = add_where(at_least(logits, all(row_.edges.at[edge])), sums[edge], each);
        }
      }
      for (int edge = 0; edge < kEdges; edge++) row_.sums[edge][stretch] = in_double(sums[edge]);
      row_.sums[kMostEdges][stretch] = in_double(sums[kEdges]);
    }
  }

  bool is_above_floor(int64_t stretch) const {
    const int64_t begin = stretch * (kStretch / kBlock), end = std::min(begin + kStretch / kBlock, num_blocks_);
    return std::any_of(row_.maxima + begin, row_.maxima + end, [&](float most) { return most >= row_.floor; });
  }

  static double in_double(Vec x) {
    DoubleSum sum;
    sum.add(x);
    return sum.total();
  }

  static double sum(const double* masses, int64_t count) {
    double sums[4] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
      for (int lane = 0; lane < 4; lane++) sums[lane] += masses[i + lane];
    for (; i < count; i++) sums[i % 4] += masses[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  int64_t draw_from_all() {
    row_.low = row_.high = row_.floor;
    row_.num_open = 0;
    return draw(row_.sums[kMostEdges], {kInfinity, 0});
  }

  // Finds between which edges the border lies, and its place among the entries there.
  int64_t draw_with_top_p() {
    row_.total = sum(row_.sums[kMostEdges], num_stretches_);
    row_.high = kInfinity;
    row_.low = row_.floor;
    double* sure = row_.sums[kMostEdges];
    double sure_mass = 0;
    for (int edge = 0; edge < row_.edges.count; edge++) {
      const double mass = sum(row_.sums[edge], num_stretches_);
      if (!is_kept_after(mass)) {
        row_.low = row_.edges.at[edge];
        break;
      }
      row_.high = row_.edges.at[edge];
      sure = row_.sums[edge];
      sure_mass = mass;
    }
    if (row_.high == kInfinity) std::fill_n(sure, num_stretches_, 0.0);
    gather_open();
    return draw(sure, find_cut(sure_mass));
  }

  // Top-p keeps a token if what comes before it leaves more than the share that may be dropped.
  bool is_kept_after(double before) const {
    return row_.total - before > row_.settings.dropped_share * row_.total || before == 0;
  }

  void gather_open() {
    int64_t gathered = 0;
    alignas(64) float padded[kBlock];
    const Vec low = all(row_.low), high = all(row_.high);
    for (int64_t block = 0; block < num_blocks_; block++) {
      if (row_.maxima[block] < row_.low) continue;
      const float* x = logits_from(block * kBlock, kBlock, padded);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Vec logits = load(x + i);
        const Mask is_open = without(at_least(logits, low), at_least(logits, high));
        store_places(row_.open_ids + gathered, is_open, static_cast<int32_t>(block * kBlock + i));
        gathered += count(is_open);
      }
    }
    for (int64_t i = 0; i < gathered; i++) row_.open_logits[i] = row_.logits[row_.open_ids[i]];
    for_each_vector(gathered, [&](int64_t i, int64_t count) {
      store(row_.open_weights + i, weights(load(row_.open_logits + i, count)), count);
    });
    row_.num_open = gathered;
  }

  // Calls body(place) for all open entries, rising in id.
  template <typename Body>
  void for_each_open(const Body& body) const {
    for (int64_t place = 0; place < row_.num_open; place++) body(place);
  }

  // Adds up the open entries by logit, largest first, until the rest may be dropped; sorts the last bin alone.
  Cut find_cut(double before) const {
    const float top = std::min(row_.high, row_.largest);
    float bottom = top;
    for_each_open([&](int64_t place) { bottom = std::min(bottom, row_.open_logits[place]); });
    const float bins_per_logit = top - bottom > 1e-30f ? kBins / (top - bottom) : 0;
    const auto bin_of = [&](int64_t place) {
      return static_cast<int>(std::min((top - row_.open_logits[place]) * bins_per_logit, kBins - 1.0f));
    };
    double masses[kBins] = {};
    for_each_open([&](int64_t place) { masses[bin_of(place)] += row_.open_weights[place]; });
    int last = 0;
    for (; last < kBins && is_kept_after(before + masses[last]); last++) before += masses[last];
    if (last == kBins) return {-kInfinity, 0};
    int32_t* end = row_.border_places;
    for_each_open([&](int64_t place) {
      if (bin_of(place) == last) *end++ = static_cast<int32_t>(place);
    });
    return cut_among(row_.border_places, end, before);
  }

  // Places rise with ids.
  Cut cut_among(int32_t* begin, int32_t* end, double before) const {
    const float* logits = row_.open_logits;
    std::sort(begin, end, [&](int32_t a, int32_t b) {
      return logits[a] > logits[b] || (logits[a] == logits[b] && a > b);
    });
    Cut cut = {kInfinity, 0};
    for (const int32_t* place = begin; place < end && is_kept_after(before); place++) {
      cut = {logits[*place], row_.open_ids[*place]};
      before += row_.open_weights[*place];
    }
    return cut;
  }

  static bool is_kept(const Cut& cut, float logit, int32_t id) {
    return logit > cut.value || (logit == cut.value && id >= cut.id);
  }

  // The number times the weight of all that is kept falls into one stretch, and the rest of it on a token there.
  // `masses` has the weight of what is kept for sure.
  int64_t draw(double* masses, const Cut& cut) {
    for_each_open([&](int64_t place) {
      const bool kept = is_kept(cut, row_.open_logits[place], row_.open_ids[place]);
      masses[row_.open_ids[place] / kStretch] += kept ? row_.open_weights[place] : 0.0f;
    });
    const double target = row_.settings.uniform * sum(masses, num_stretches_);
    double up_to = 0, before = 0;
    int64_t chosen = 0;
    for (int64_t stretch = 0; stretch < num_stretches_; stretch++) {
      if (masses[stretch] == 0) continue;
      chosen = stretch;
      before = up_to;
      up_to += masses[stretch];
      if (up_to > target) break;
    }
    return draw_in(chosen, target - before, cut);
  }

  int64_t draw_in(int64_t stretch, double target, const Cut& cut) const {
    alignas(64) float padded[kStretch], each[kStretch];
    const float* x = logits_from(stretch * kStretch, kStretch, padded);
    for (int64_t i = 0; i < kStretch; i += kLanes) store(each + i, weights(load(x + i)));
    double up_to = 0;
    int64_t last = stretch * kStretch;
    for (int64_t i = 0; i < kStretch; i++) {
      const auto id = static_cast<int32_t>(stretch * kStretch + i);
      if (x[i] < row_.high && !(x[i] >= row_.low && is_kept(cut, x[i], id))) continue;
      last = id;
      up_to += each[i];
      if (up_to > target) break;
    }
    return last;
  }

  static constexpr float kForecastDepth = 35;  // powers of 2: all tokens of a vocabulary weigh nothing below

  Team& team_;
  Row& row_;
  const int64_t num_blocks_, num_stretches_;
};

const float* logits_of(const SageDraw& draw, int64_t index) {
  return draw.logits + (draw.places == nullptr ? index : draw.places[index]) * draw.vocab;
}

// Returns the token to rank 0. The same members choose up to the row `end`.
void choose(Team& team, const SageDraw& draw, int64_t index, int64_t end, Row& row) {
  if (team.rank() == 0) {
    const float* given = logits_of(draw, index);
    row.given = given;
    row.mask = nullptr;
    row.edits = row.edits_end = nullptr;
    if (draw.mask_rows != nullptr && draw.mask_rows[index] >= 0)
      row.mask = draw.masks + draw.mask_rows[index] * ((draw.vocab + 31) / 32);
    if (draw.edit_offsets != nullptr) {
      row.edits = draw.edits + draw.edit_offsets[index];
      row.edits_end = draw.edits + draw.edit_offsets[index + 1];
    }
    const float* drawn_from = given;
    if (draw.replaced_rows != nullptr && draw.replaced_rows[index] >= 0)
      row.given = drawn_from = draw.replaced + draw.replaced_rows[index] * draw.vocab;
    row.logits = row.mask != nullptr || row.edits != row.edits_end ? row.changed : drawn_from;
    row.next_logits = index + 1 < end ? logits_of(draw, index + 1) : given;
    row.settings = draw.settings[index];
    if (draw.keys != nullptr) row.settings.uniform = uniform(draw.keys[index], draw.positions[index]);
  }
  team.barrier();
  const int64_t token = Choice(team, row).run();
  if (team.rank() != 0) return;
  draw.tokens[index] = token;
  if (draw.num_top == nullptr || draw.num_top[index] < 0) return;
  row.given = logits_of(draw, index);
  const int64_t width = 2 + 2 * draw.most_top;
  Choice(team, row).report(token, draw.num_top[index], draw.logprobs + index * width, draw.most_top);
}

}  // namespace

double uniform(uint64_t key, uint64_t position) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  uint32_t counter[4] = {low(position), high(position), 0, 0};
  uint32_t keys[2] = {low(key), high(key)};
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = high(second) ^ counter[1] ^ keys[0];
    counter[1] = low(second);
    counter[2] = high(first) ^ counter[3] ^ keys[1];
    counter[3] = low(first);
    keys[0] += 0x9E3779B9;
    keys[1] += 0xBB67AE85;
  }
  const uint64_t bits = (uint64_t{counter[0]} >> 5) << 26 | counter[1] >> 6;
  return static_cast<double>(bits) * 0x1p-53;
}

int64_t draw_scratch_bytes(int64_t vocab, int num_threads) { return num_threads * place(nullptr, vocab); }

void draw_tokens(Team& team, const SageDraw& draw) {
  unsigned char* own = draw.scratch + team.rank() * place(nullptr, draw.vocab);
  place(own, draw.vocab);
  if (draw.num_rows == 1 || draw.num_rows * kMembersPerRow <= team.size()) {
    Row& shared = *reinterpret_cast<Row*>(draw.scratch);
    for (int64_t row = 0; row < draw.num_rows; row++) choose(team, draw, row, draw.num_rows, shared);
    return;
  }
  team.share(draw.num_rows, 1, [&](int64_t begin, int64_t end) {
    Alone self;
    for (int64_t row = begin; row < end; row++) choose(self, draw, row, end, *reinterpret_cast<Row*>(own));
  });
}

}  // namespace sage
