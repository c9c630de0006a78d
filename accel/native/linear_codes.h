// Weights that stay codes in memory and are multiplied as bf16 or float32: a panel's codes are expanded just before
// its product, into the layout that the kernels of that kind take.
//
// A panel is a run of units, each a few blocks of 32 inputs followed by one set of scales, zeros and offsets per group
// (groups of 16 have two sets to a unit of one block); factors of scales come before all units. The codes of a block:
//
//   8 bits  [16 pairs of inputs][half][lane][2 bytes]
//   4 bits  [4 x 4 pairs][half][word of 4 bytes]: nibble 2 p + s of word w is input w % 2 of pair p, lane s * kLanes / 2 + w / 2
//
// so that shifting whole words, or widening whole bytes, gives two vectors in the order in which pairs of bf16 lie.
#pragma once
#include <type_traits>

#include "linear_layout.h"

namespace sage::linear {

constexpr int64_t kBlock = 32;

constexpr bool in_nibbles(Code code) { return code == Code::int4 || code == Code::uint4 || code == Code::e2m1; }
inline int64_t bits_of(Code code) { return in_nibbles(code) ? 4 : 8; }

struct CodedLayout {
  int64_t group;        // inputs of a set: the weight's own, or 16 where those do not divide into blocks
  int64_t repeats;      // sets that one stored scale makes
  int64_t unit_blocks, unit_bytes, num_units;
  int64_t block_bytes;
  SetLayout sets;
  int64_t sets_per_unit;
  int64_t num_factors = 0, groups_per_factor = 1;
  int64_t num_blocks, num_panels, panel_bytes;

  explicit CodedLayout(const Weight& w) : sets(w) {
    const int64_t whole = round_up(w.k, kBlock);
    const int64_t stored = w.group > 0 && w.group < w.k ? w.group : whole;
    group = stored % kBlock == 0 ? stored : 16;
    repeats = stored / group;
    const int64_t unit = group < kBlock ? kBlock : group;
    unit_blocks = unit / kBlock;
    sets_per_unit = unit / group;
    num_units = ceil_div(w.k, unit);
    num_blocks = whole / kBlock;
    block_bytes = kBlock * kPanel * bits_of(w.coding.code) / 8;
    unit_bytes = round_up(unit_blocks * block_bytes + sets_per_unit * sets.num_bytes, kHalfBytes);
    panel_bytes = sets.factors_end + num_units * unit_bytes;
    if (w.coding.scale_group > 0) num_factors = w.k / w.coding.scale_group, groups_per_factor = w.coding.scale_group / group;
    num_panels = PanelLayout(w).num_panels;
  }
  int64_t codes_at(int64_t block) const {
    return sets.factors_end + block / unit_blocks * unit_bytes + block % unit_blocks * block_bytes;
  }
  // Sets are counted in groups.
  int64_t set_at(int64_t set) const {
    return sets.factors_end + set / sets_per_unit * unit_bytes + unit_blocks * block_bytes +
           set % sets_per_unit * sets.num_bytes;
  }
  // A block that ends behind the last input has a set too many.
  int64_t factors_at(int64_t set) const {
    if (num_factors == 0) return 0;
    const int64_t factor = set / groups_per_factor;
    return (factor < num_factors ? factor : num_factors - 1) * sets.factor_bytes;
  }
  // The set of half a block.
  int64_t set_of(int64_t block, int64_t part) const {
    return block / unit_blocks * sets_per_unit + (sets_per_unit == 2 ? part : 0);
  }
};

// Bytes of a panel in memory, whatever its form.
inline int64_t stored_panel_bytes(const Weight& w, const PanelLayout& plain) {
  return w.coding.code == Code::none ? plain.panel_bytes : CodedLayout(w).panel_bytes;
}

// Two vectors in the order of pairs: lane w of `low` is input w % 2 of output w / 2, of `high` of output kLanes / 2 + w / 2.
struct Pair {
  Vec low, high;
};

#if defined(__AVX512F__)
inline Pair in_pairs(Vec by_output) {
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return {_mm512_permutexvar_ps(low, by_output),
          _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), by_output)};
}
inline Pair half_floats(__m512i words) {
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(words)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1))};
}
// Numbers of nibble `shift` / 4 of each word.
template <Code code>
inline Vec numbers_of_nibbles(__m512i words, int shift) {
  const Vec table = code == Code::int4
                        ? _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)
                    : code == Code::uint4
                        ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                        : _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(words, static_cast<unsigned>(shift)), table);  // by four bits
}
template <Code code>
inline Pair numbers_of_bytes(const unsigned char* codes) {
  if constexpr (code == Code::int8) {
    return {load_int8(codes), load_int8(codes + kLanes)};
  } else {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    if constexpr (code == Code::e5m2) return half_floats(_mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8));
    const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
    return half_floats(_mm512_and_si512(words, _mm512_set1_epi16(static_cast<int16_t>(0xBF80))));
  }
}
inline __m512i as_bf16(const Pair& x) {
#if defined(__AVX512BF16__)
  return (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low);
#else
#error "AVX-512 without BF16 has no variant"
#endif
}
inline Pair by_input(const Pair& x) {  // of both inputs all outputs
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_ps(x.low, even, x.high),
          _mm512_permutex2var_ps(x.low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), x.high)};
}
using Words = __m512i;
inline Words load_words(const unsigned char* codes) { return _mm512_loadu_si512(codes); }
#else
inline Pair in_pairs(Vec by_output) {
  const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  return {_mm256_permutevar8x32_ps(by_output, low),
          _mm256_permutevar8x32_ps(by_output, _mm256_add_epi32(low, _mm256_set1_epi32(4)))};
}
inline Pair half_floats(__m256i words) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
}
template <Code code>
inline Vec numbers_of_nibbles(__m256i words, int shift) {
  const __m256i codes = _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(15));
  if constexpr (code == Code::uint4) return _mm256_cvtepi32_ps(codes);
  if constexpr (code == Code::int4) return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
  const Vec sizes = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), codes);  // by three bits
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(sizes, _mm256_castsi256_ps(sign));
}
template <Code code>
inline Pair numbers_of_bytes(const unsigned char* codes) {
  if constexpr (code == Code::int8) {
    return {load_int8(codes), load_int8(codes + kLanes)};
  } else {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    if constexpr (code == Code::e5m2) return half_floats(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return half_floats(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xBF80))));
  }
}
inline __m256i rounded_words(Vec x) {  // in the low halves
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
inline __m256i as_bf16(const Pair& x) {
  const __m256i mixed = _mm256_packus_epi32(rounded_words(x.low), rounded_words(x.high));
  return _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
}
inline Pair by_input(const Pair& x) {
  const auto in_order = [](Vec mixed) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), _MM_SHUFFLE(3, 1, 2, 0)));
  };
  return {in_order(_mm256_shuffle_ps(x.low, x.high, _MM_SHUFFLE(2, 0, 2, 0))),
          in_order(_mm256_shuffle_ps(x.low, x.high, _MM_SHUFFLE(3, 1, 3, 1)))};
}
using Words = __m256i;
inline Words load_words(const unsigned char* codes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)); }
#endif

// One set's numbers for a half of a panel.
struct Set {
  Pair scale, zero, offset;
};

template <Code code, bool is_shifted>
inline Set set_of(const Weight& w, const CodedLayout& layout, const unsigned char* panel, int64_t index, int64_t half) {
  const unsigned char *set = panel + layout.set_at(index), *factors = panel + layout.factors_at(index);
  Set s;
  Vec scale = layout.sets.scales(set, factors, half);
  if constexpr (code == Code::e4m3) scale = mul(scale, all(256.0f));  // the exponent of a half float is 8 off
  s.scale = in_pairs(scale);
  if constexpr (is_shifted) {
    s.zero = in_pairs(w.coding.has_zeros ? load_int8(set + layout.sets.zeros_at + half * kLanes) : zero());
    s.offset = in_pairs(w.coding.has_offsets ? layout.sets.offsets(set, factors, half) : zero());
    if constexpr (code == Code::e4m3) s.zero = {mul(s.zero.low, all(1 / 256.0f)), mul(s.zero.high, all(1 / 256.0f))};
  }
  return s;
}

// Numbers as the values that they stand for.
template <bool is_shifted>
inline Pair values_of(Pair x, const Set& s) {
  if constexpr (is_shifted) {
    Vec low = mul(sub(x.low, s.zero.low), s.scale.low), high = mul(sub(x.high, s.zero.high), s.scale.high);
    asm("" : "+v"(low), "+v"(high));  // products are rounded: no fused operations with what comes
    return {sub(low, s.offset.low), sub(high, s.offset.high)};
  } else {
    return {mul(x.low, s.scale.low), mul(x.high, s.scale.high)};
  }
}

template <WeightKind kind>
inline void put_pair(const Pair& x, unsigned char* out, int64_t pair, int64_t half) {
  if constexpr (kind == WeightKind::bf16) {
    unsigned char* to = out + (kHasTiles ? half * kTileBytes + pair * 64 : pair * kLineBytes + half * kHalfBytes);
    *reinterpret_cast<Words*>(to) = as_bf16(x);
  } else {
    const Pair inputs = by_input(x);
    float* line = reinterpret_cast<float*>(out + 2 * pair * kLineBytes + half * kHalfBytes);
    store(line, inputs.low);
    store(line + kPanel, inputs.high);
  }
}

// How far the stream of codes is fetched ahead.
constexpr int64_t kCodesAhead = 2048;

// take(values, pair) for pairs of inputs [8 * part, 8 * part + 8) of a block, and a half of the outputs.
template <Code code, bool is_shifted, class Take>
inline __attribute__((always_inline)) void for_pairs(const unsigned char* codes, const Set& set, int64_t part, int64_t half,
                                                     const Take& take) {
  if constexpr (in_nibbles(code)) {
    for (int64_t four = 2 * part; four < 2 * part + 2; ++four) {
      const Words words = load_words(codes + (2 * four + half) * kHalfBytes);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const Pair x = {numbers_of_nibbles<code>(words, 8 * pair), numbers_of_nibbles<code>(words, 8 * pair + 4)};
        take(values_of<is_shifted>(x, set), 4 * four + pair);
      }
    }
  } else {
#pragma GCC unroll 4
    for (int64_t pair = 8 * part; pair < 8 * part + 8; ++pair) {
      take(values_of<is_shifted>(numbers_of_bytes<code>(codes + (2 * pair + half) * 2 * kLanes), set), pair);
    }
  }
}

// Expands one block of a panel to kBlock inputs of the kind's layout. `out` is aligned.
template <Code code, WeightKind kind, bool is_shifted>
static void expand_block(const Weight& w, const CodedLayout& layout, const unsigned char* panel, int64_t block,
                         unsigned char* out) {
  const unsigned char* codes = panel + layout.codes_at(block);
  for (int64_t i = 0; i < layout.block_bytes; i += 64) prefetch(codes + kCodesAhead + i);
  for (int64_t half = 0; half < 2; ++half) {
    Set set = set_of<code, is_shifted>(w, layout, panel, layout.set_of(block, 0), half);
    for (int64_t part = 0; part < 2; ++part) {
      if (part == 1 && layout.sets_per_unit == 2) {
        set = set_of<code, is_shifted>(w, layout, panel, layout.set_of(block, 1), half);
      }
      for_pairs<code, is_shifted>(codes, set, part, half, [&](const Pair& x, int64_t pair) { put_pair<kind>(x, out, pair, half); });
    }
  }
}

// make(code, is_shifted) for a weight's coding, both as types: there is a kernel for each.
template <class Kernel, class Make>
Kernel of_coding(const Weight& w, const Make& make) {
  const auto shifted = [&](auto code) -> Kernel {
    const bool is_shifted = w.coding.has_zeros || w.coding.has_offsets;
    return is_shifted ? make(code, std::true_type()) : make(code, std::false_type());
  };
  switch (w.coding.code) {
    case Code::int4: return shifted(std::integral_constant<Code, Code::int4>());
    case Code::uint4: return shifted(std::integral_constant<Code, Code::uint4>());
    case Code::int8: return shifted(std::integral_constant<Code, Code::int8>());
    case Code::e4m3: return shifted(std::integral_constant<Code, Code::e4m3>());
    case Code::e5m2: return shifted(std::integral_constant<Code, Code::e5m2>());
    default: return shifted(std::integral_constant<Code, Code::e2m1>());
  }
}

// Expands the panels of one weight.
class Expander {
 public:
  explicit Expander(const Weight& w) : weight_(w), layout_(w), expand_(choose(w)) {}

  const unsigned char* panel(int64_t index) const { return weight_.data + index * layout_.panel_bytes; }
  int64_t num_blocks() const { return layout_.num_blocks; }
  // Bytes of a block in the kind's layout.
  int64_t block_bytes() const { return kBlock * kPanel * (weight_.kind == WeightKind::bf16 ? 2 : 4); }
  void block(const unsigned char* panel, int64_t index, unsigned char* out) const {
    expand_(weight_, layout_, panel, index, out);
  }
  void whole(const unsigned char* panel, unsigned char* out) const {
    for (int64_t i = 0; i < layout_.num_blocks; ++i) block(panel, i, out + i * block_bytes());
  }

 private:
  using Function = void (*)(const Weight&, const CodedLayout&, const unsigned char*, int64_t, unsigned char*);

  static Function choose(const Weight& w) {
    return of_coding<Function>(w, [&](auto code, auto is_shifted) -> Function {
      return w.kind == WeightKind::bf16 ? expand_block<code(), WeightKind::bf16, is_shifted()>
                                        : expand_block<code(), WeightKind::f32, is_shifted()>;
    });
  }

  const Weight& weight_;
  const CodedLayout layout_;
  const Function expand_;
};

}  // namespace sage::linear
