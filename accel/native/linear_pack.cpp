// Weights into panels and back.
#include <cstring>
#include <vector>

#include "linear_codes.h"
#include "linear_layout.h"

namespace sage {
namespace linear {
namespace {

// Four rows of four words of 32 bits; afterwards vector i has word i of each row.
inline void transpose(__m128i (&x)[4]) {
  const __m128i a = _mm_unpacklo_epi32(x[0], x[1]), b = _mm_unpackhi_epi32(x[0], x[1]);
  const __m128i c = _mm_unpacklo_epi32(x[2], x[3]), d = _mm_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm_unpacklo_epi64(a, c);
  x[1] = _mm_unpackhi_epi64(a, c);
  x[2] = _mm_unpacklo_epi64(b, d);
  x[3] = _mm_unpackhi_epi64(b, d);
}

// 16 bytes of each of four rows, transposed.
inline void load_transposed(const void* rows, int64_t stride_bytes, __m128i (&x)[4]) {
  for (int64_t i = 0; i < 4; ++i) {
    x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(rows) + i * stride_bytes));
  }
  transpose(x);
}

inline void put(unsigned char* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }

// Writes element `index` of `from`, of 1, 2 or 4 bytes, as element `lane` of `to`; 0 for a lane without an output.
inline void put_element(unsigned char* to, int64_t lane, const void* from, int64_t index, int64_t num_bytes) {
  const auto* source = static_cast<const unsigned char*>(from) + index * num_bytes;
  to += lane * num_bytes;
  if (index < 0) {
    std::memset(to, 0, static_cast<size_t>(num_bytes));
  } else if (num_bytes == 1) {
    *to = *source;
  } else {
    num_bytes == 2 ? std::memcpy(to, source, 2) : std::memcpy(to, source, 4);
  }
}

// What an output has for one group, that of `index` in `rows`; -1: nothing, for a lane without an output.
inline void put_set(const Weight& w, const SetLayout& sets, unsigned char* set, int64_t lane, const CodedRows& rows, int64_t index) {
  put_element(set, lane, rows.scales, index, sets.scale_bytes);
  if (w.coding.has_zeros) put_element(set + sets.zeros_at, lane, rows.zeros, index, 1);
  if (w.coding.has_offsets) put_element(set + sets.offsets_at, lane, rows.offsets, index, sets.offset_bytes);
}

// The factors of an output, of row `i` of `rows`; -1: none.
inline void put_factors(const Weight& w, const SetLayout& sets, unsigned char* panel, int64_t lane, const CodedRows& rows, int64_t i) {
  const int64_t count = w.coding.scale_group > 0 ? w.k / w.coding.scale_group : 0;
  for (int64_t group = 0; group < count; ++group, panel += sets.factor_bytes) {
    const int64_t index = i < 0 ? -1 : i * count + group;
    put_element(panel, lane, rows.factors, index, 2);
    if (w.coding.has_offsets) put_element(panel + 2 * kPanel, lane, rows.offset_factors, index, 2);
  }
}

struct Packer {
  const Weight& w;
  PanelLayout panels;

  explicit Packer(const Weight& weight) : w(weight), panels(weight) {}

  unsigned char* panel(Column c) const { return w.data + c.panel * panels.panel_bytes; }
  unsigned char* group(Column c, int64_t index) const { return panel(c) + panels.codes_at(index); }
  // What the numbers of an output stand for, to `row`.
  void unpack(Column c, float* row) const {
    for (int64_t index = 0; index < panels.depth.num_groups; ++index) {
      const unsigned char* at = panel(c) + panels.set_at(index);
      const GroupSet<> set(w, panels.sets, at, panel(c) + panels.factors_at(index), c.lane / kLanes);
      float scales[kLanes], offsets[kLanes] = {};
      store(scales, set.scale);
      if (set.has_offsets) store(offsets, set.offset);
      const float scale = scales[c.lane % kLanes], offset = offsets[c.lane % kLanes];
      const int32_t zero = set.has_zeros ? reinterpret_cast<const int8_t*>(at + panels.sets.zeros_at)[c.lane] : 0;
      for (int64_t k = 0; k < panels.depth.size(index); ++k, ++row) {
        float value = static_cast<float>(number_at(c, index, k) - zero) * scale;
        asm("" : "+x"(value));  // a rounded product, as in `values_of`
        *row = set.has_offsets ? value - offset : value;
      }
    }
  }
  // What the sets of all groups have for an output, from row `i` of `rows`; -1: none.
  void put_sets(Column c, const CodedRows& rows, int64_t i) const {
    const int64_t num_groups = panels.depth.num_groups;
    for (int64_t index = 0; index < num_groups; ++index) {
      put_set(w, panels.sets, panel(c) + panels.set_at(index), c.lane, rows, i < 0 ? -1 : i * num_groups + index);
    }
    put_factors(w, panels.sets, panel(c), c.lane, rows, i);
  }
  // Dot products of bytes take one unsigned operand: without tiles, AVX-512 weights are stored as value + 128.
  uint32_t flip(int64_t element_size) const {
    return element_size == 1 && kHasDots && !in_tiles(w.kind) ? 0x80808080u : 0u;
  }
  int64_t offset(int64_t k_byte, int64_t lane) const {
    return in_tiles(w.kind) ? tile_offset(k_byte, lane) : quad_offset(k_byte, lane);
  }

  // `row`: k elements of the weight's width in memory, or null for zeros; those of the group before `first` are left out.
  template <typename Element>
  void put_row(Column c, const Element* row, int64_t index, int64_t first = 0) const {
    unsigned char* to = group(c, index);
    const int64_t begin = panels.depth.begin(index), size = row != nullptr ? panels.depth.size(index) : 0;
    const int64_t padded = panels.depth.steps_per_group * panels.depth.step;
    constexpr int64_t per_quad = 4 / sizeof(Element);
    for (int64_t k = first; k < padded; k += per_quad) {
      Element quad[per_quad];
      for (int64_t i = 0; i < per_quad; ++i) quad[i] = k + i < size ? row[begin + k + i] : Element{};
      uint32_t bits;
      std::memcpy(&bits, quad, 4);
      bits ^= flip(sizeof(Element));
      std::memcpy(to + offset(k * static_cast<int64_t>(sizeof(Element)), c.lane), &bits, 4);
    }
  }
  // Rows of a whole half of a panel, whose quads at one k lie side by side: writing these at once is several times
  // as fast as writing row by row, each quad to another line of the cache.
  template <typename Element>
  void put_half(Column first, const Element* rows, int64_t stride, int64_t index) const {
    unsigned char* to = group(first, index);
    constexpr int64_t size = sizeof(Element), at_once = 16 / size;
    const __m128i flipped = _mm_set1_epi32(static_cast<int>(flip(size)));
    const int64_t padded = panels.depth.steps_per_group * panels.depth.step;
    const int64_t whole = panels.depth.size(index) / at_once * at_once;
    const Element* from = rows + panels.depth.begin(index);
    for (int64_t k = 0; k < whole; k += at_once) {
      for (int64_t lane = 0; lane < kLanes; lane += 4) {
        __m128i quads[4];
        load_transposed(from + lane * stride + k, stride * size, quads);
        for (int64_t i = 0; i < 4; ++i) {
          put(to + offset(k * size + 4 * i, first.lane + lane), _mm_xor_si128(quads[i], flipped));
        }
      }
    }
    if (whole == padded) return;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      put_row(Column{first.panel, first.lane + lane}, rows + lane * stride, index, whole);
    }
  }
  // int4 codes, two to a byte, of rows of a whole half; groups are multiples of 32 inputs.
  void put_half_of_nibbles(Column first, const unsigned char* rows, int64_t row_bytes) const {
    const __m128i low = _mm_set1_epi8(15), pairs = _mm_set1_epi32(0xffff);
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (int64_t index = 0; index < panels.depth.num_groups; ++index) {
      unsigned char* to = group(first, index);
      const unsigned char* from = rows + panels.depth.begin(index) / 2;
      for (int64_t k = 0; k < panels.depth.group; k += 32) {
        for (int64_t lane = 0; lane < kLanes; lane += 4) {
          __m128i words[4];
          load_transposed(from + lane * row_bytes + k / 2, row_bytes, words);
          for (int64_t i = 0; i < 4; ++i) {
            __m128i even = _mm_and_si128(words[i], low), odd = _mm_and_si128(_mm_srli_epi32(words[i], 4), low);
            even = _mm_and_si128(_mm_or_si128(even, _mm_srli_epi32(even, 12)), pairs);
            odd = _mm_slli_epi32(_mm_or_si128(odd, _mm_srli_epi32(odd, 12)), 16);
            put(to + nibble_offset(k + 8 * i, first.lane + lane), _mm_shuffle_epi8(_mm_or_si128(even, odd), order));
          }
        }
      }
    }
  }
  // Numbers of int6, a byte each, of the rows of a whole half.
  void put_half_of_sixes(Column first, const int8_t* rows) const {
    const __m128i low = _mm_set1_epi8(15), two_bits = _mm_set1_epi8(3), excess = _mm_set1_epi8(32);
    for (int64_t index = 0; index < panels.depth.num_groups; ++index) {
      const int8_t* from = rows + panels.depth.begin(index);
      for (int64_t k = 0; k < panels.depth.group; k += 16) {
        for (int64_t lane = 0; lane < kLanes; lane += 4) {
          unsigned char* to = group(first, index) + six_offset(k, first.lane + lane);
          __m128i quads[4];
          load_transposed(from + lane * w.k + k, w.k, quads);
          __m128i nibbles[4], bits = _mm_setzero_si128();
          for (int i = 0; i < 4; ++i) {
            const __m128i codes = _mm_add_epi8(quads[i], excess);
            nibbles[i] = _mm_and_si128(codes, low);
            bits = _mm_or_si128(bits, _mm_slli_epi16(_mm_and_si128(_mm_srli_epi16(codes, 4), two_bits), 2 * i));
          }
          put(to, _mm_or_si128(nibbles[0], _mm_slli_epi16(nibbles[1], 4)));
          put(to + kHalfBytes, _mm_or_si128(nibbles[2], _mm_slli_epi16(nibbles[3], 4)));
          put(to + 2 * kHalfBytes, bits);
        }
      }
    }
  }
  // Numbers of int4 or int6 in a byte each.
  void put_numbers(Column c, const int8_t* row) const {
    const int32_t excess = excess_of(w);
    for (int64_t index = 0; index < panels.depth.num_groups; ++index) {
      unsigned char* to = group(c, index);
      const int64_t begin = panels.depth.begin(index), size = panels.depth.size(index);
      const int64_t padded = panels.depth.steps_per_group * panels.depth.step;
      const auto code = [&](int64_t k) { return (row != nullptr && k < size ? row[begin + k] : 0) + excess; };
      const auto put_quads = [&](unsigned char* quad, int64_t k) {
        for (int64_t i = 0; i < 4; ++i) quad[i] = static_cast<unsigned char>((code(k + i) & 15) | (code(k + 4 + i) & 15) << 4);
      };
      if (w.kind == WeightKind::int4) {
        for (int64_t k = 0; k < padded; k += 8) put_quads(to + nibble_offset(k, c.lane), k);
        continue;
      }
      for (int64_t k = 0; k < padded; k += 16) {
        unsigned char* quads = to + six_offset(k, c.lane);
        put_quads(quads, k);
        put_quads(quads + kHalfBytes, k + 8);
        for (int64_t i = 0; i < 4; ++i) {
          int32_t bits = 0;
          for (int64_t quad = 0; quad < 4; ++quad) bits |= (code(k + 4 * quad + i) >> 4 & 3) << 2 * quad;
          quads[2 * kHalfBytes + i] = static_cast<unsigned char>(bits);
        }
      }
    }
  }
  // The number of a group's input.
  int32_t number_at(Column c, int64_t index, int64_t inside) const {
    const unsigned char* from = group(c, index);
    if (w.kind == WeightKind::int8 || w.kind == WeightKind::int8_groups) {
      return static_cast<int8_t>(from[offset(inside, c.lane)] ^ (flip(1) & 0xff));
    }
    const int64_t quad = inside / 4, high = quad % 2 * 4;
    if (w.kind == WeightKind::int4) return (from[nibble_offset(inside, c.lane)] >> high & 15) - excess_of(w);
    from += six_offset(inside, c.lane) + inside % 4;
    const int32_t nibble = from[quad % 4 / 2 * kHalfBytes] >> high & 15, bits = from[2 * kHalfBytes] >> 2 * (quad % 4) & 3;
    return (nibble | bits << 4) - excess_of(w);
  }
};

// Calls put(column, row) for each output, and with no row for the lanes that the last panel has too many.
template <typename Element, typename Put>
void each_output(const Weight& w, const PanelLayout& panels, int64_t begin, int64_t count, const Element* rows,
                 int64_t stride, const Put& put) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t output = begin + i;
    const Column column = column_of(w, panels, output);
    put(column, i, rows + i * stride);
    const bool ends_half = output + 1 == w.n || (w.is_gated && output + 1 == w.n / 2);
    if (!ends_half) continue;
    const int64_t lanes = w.is_gated ? (column.lane / kLanes + 1) * kLanes : kPanel;
    for (int64_t lane = column.lane + 1; lane < lanes; ++lane) {
      put(Column{column.panel, lane}, -1, static_cast<const Element*>(nullptr));
    }
  }
}

// Outputs from `output` on, of `count`, that fill a half of a panel, and are not the last of all: behind these there
// may be lanes to fill with zeros.
bool fills_half(const Weight& w, Column column, int64_t output, int64_t count) {
  const int64_t end = w.is_gated && output < w.n / 2 ? w.n / 2 : w.n;
  return column.lane % kLanes == 0 && count >= kLanes && end - output > kLanes;
}

// `sets`: what integers have for each group, or null.
template <typename Element>
void pack_rows_of(const Weight& w, int64_t begin, int64_t count, const Element* rows, int64_t stride,
                  const CodedRows* sets = nullptr) {
  const Packer packer(w);
  const int64_t num_groups = packer.panels.depth.num_groups;
  for (int64_t done = 0; done < count;) {
    const Column column = column_of(w, packer.panels, begin + done);
    if (fills_half(w, column, begin + done, count - done)) {
      for (int64_t index = 0; index < num_groups; ++index) packer.put_half(column, rows + done * stride, stride, index);
      for (int64_t lane = 0; sets != nullptr && lane < kLanes; ++lane) {
        packer.put_sets(Column{column.panel, column.lane + lane}, *sets, done + lane);
      }
      done += kLanes;
      continue;
    }
    each_output(w, packer.panels, begin + done, 1, rows + done * stride, stride,
                [&](Column c, int64_t, const Element* row) {
                  for (int64_t index = 0; index < num_groups; ++index) packer.put_row(c, row, index);
                  if (sets != nullptr) packer.put_sets(c, *sets, row != nullptr ? done : -1);
                });
    ++done;
  }
}

// Integers that are multiplied as such, in a byte each.
void pack_numbers(const Weight& w, int64_t begin, int64_t count, const int8_t* rows, int64_t stride, const CodedRows& sets) {
  if (w.kind != WeightKind::int4) return pack_rows_of(w, begin, count, rows, stride, &sets);
  const Packer packer(w);
  each_output(w, packer.panels, begin, count, rows, stride, [&](Column c, int64_t i, const int8_t* row) {
    packer.put_numbers(c, row);
    packer.put_sets(c, sets, i);
  });
}

// The same as codes.
void pack_integers(const Weight& w, int64_t begin, int64_t count, const CodedRows& rows) {
  const auto* bytes = reinterpret_cast<const int8_t*>(rows.codes);
  if (w.kind != WeightKind::int4 && w.kind != WeightKind::int6) return pack_numbers(w, begin, count, bytes, w.k, rows);
  const Packer packer(w);
  const Depth& depth = packer.panels.depth;
  const bool in_sixes = w.kind == WeightKind::int6;
  const bool is_whole = (in_sixes || depth.group % kBlock == 0) && depth.num_groups * depth.group == w.k;
  std::vector<int8_t> numbers(static_cast<size_t>(w.k));
  for (int64_t done = 0; done < count;) {
    const unsigned char* codes = rows.codes + done * w.k / 2;  // of nibbles
    const Column column = column_of(w, packer.panels, begin + done);
    if (is_whole && fills_half(w, column, begin + done, count - done)) {
      in_sixes ? packer.put_half_of_sixes(column, bytes + done * w.k) : packer.put_half_of_nibbles(column, codes, w.k / 2);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        packer.put_sets(Column{column.panel, column.lane + lane}, rows, done + lane);
      }
      done += kLanes;
      continue;
    }
    for (int64_t k = 0; k < w.k && !in_sixes; k += 2) {
      numbers[static_cast<size_t>(k)] = static_cast<int8_t>((codes[k / 2] & 15) - excess_of(w));
      numbers[static_cast<size_t>(k + 1)] = static_cast<int8_t>((codes[k / 2] >> 4) - excess_of(w));
    }
    const int8_t* one = in_sixes ? bytes + done * w.k : numbers.data();
    each_output(w, packer.panels, begin + done, 1, one, w.k, [&](Column c, int64_t, const int8_t* row) {
      packer.put_numbers(c, row);
      packer.put_sets(c, rows, row != nullptr ? done : -1);
    });
    ++done;
  }
}

// Writes the codes of one output, from input `begin` on, a multiple of a block.
void put_codes(const Weight& w, const CodedLayout& layout, unsigned char* panel, int64_t lane, const unsigned char* row,
               int64_t begin) {
  const int64_t half = lane / kLanes, place = lane % kLanes;
  if (bits_of(w.coding.code) == 8) {
    for (int64_t k = begin; k < w.k; k += 2) {
      const int64_t pair = k % kBlock / 2;
      std::memcpy(panel + layout.codes_at(k / kBlock) + (2 * pair + half) * 2 * kLanes + 2 * place, row + k, 2);
    }
    return;
  }
  const int64_t shift = 4 * (place / (kLanes / 2)), word = 2 * (place % (kLanes / 2));
  const uint32_t kept = ~(0x0f0f0f0fu << shift);
  for (int64_t k = begin; k < w.k; k += 8) {  // the nibbles of four pairs
    uint32_t both, words[2];
    std::memcpy(&both, row + k / 2, 4);
    unsigned char* to = panel + layout.codes_at(k / kBlock) + (k % kBlock / 8 * 2 + half) * kHalfBytes + word * 4;
    std::memcpy(words, to, 8);
    words[0] = (words[0] & kept) | (both & 0x0f0f0f0fu) << shift;
    words[1] = (words[1] & kept) | (both >> 4 & 0x0f0f0f0fu) << shift;
    std::memcpy(to, words, 8);
  }
}

// A block of 8-bit codes of a half: 16 pairs of each lane. `to` is where the half's first pair lies.
void put_block_of_bytes(unsigned char* to, const unsigned char* rows, int64_t row_bytes) {
  for (int64_t lane = 0; lane < kLanes; lane += 8) {
    for (int64_t k = 0; k < kBlock; k += 16) {
      __m128i top[4], bottom[4];  // word i, two pairs, of four lanes each
      load_transposed(rows + lane * row_bytes + k, row_bytes, top);
      load_transposed(rows + (lane + 4) * row_bytes + k, row_bytes, bottom);
      const __m128i apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      for (int64_t i = 0; i < 4; ++i) {
        const __m128i a = _mm_shuffle_epi8(top[i], apart), b = _mm_shuffle_epi8(bottom[i], apart);
        unsigned char* pair = to + (k / 2 + 2 * i) * 4 * kLanes + 2 * lane;
        put(pair, _mm_unpacklo_epi64(a, b));
        put(pair + 4 * kLanes, _mm_unpackhi_epi64(a, b));
      }
    }
  }
}

// The same of 4-bit codes: a byte has one of a lane and one of the lane half a vector on.
void put_block_of_nibbles(unsigned char* to, const unsigned char* rows, int64_t row_bytes) {
  const __m128i low = _mm_set1_epi8(15), high = _mm_set1_epi8(static_cast<char>(0xf0));
  for (int64_t lane = 0; lane < kLanes / 2; lane += 4) {
    __m128i first[4], second[4];
    load_transposed(rows + lane * row_bytes, row_bytes, first);
    load_transposed(rows + (lane + kLanes / 2) * row_bytes, row_bytes, second);
    for (int64_t i = 0; i < 4; ++i) {
      const __m128i even = _mm_or_si128(_mm_and_si128(first[i], low),
                                        _mm_slli_epi32(_mm_and_si128(second[i], low), 4));
      const __m128i odd = _mm_or_si128(_mm_and_si128(_mm_srli_epi32(first[i], 4), low), _mm_and_si128(second[i], high));
      unsigned char* words = to + 2 * i * kHalfBytes + 8 * lane;
      put(words, _mm_unpacklo_epi32(even, odd));
      put(words + 16, _mm_unpackhi_epi32(even, odd));
    }
  }
}

// Writes the codes of `count` outputs from a lane on: one, or those of a whole half.
void put_codes_of(const Weight& w, const CodedLayout& layout, unsigned char* panel, int64_t lane, int64_t count,
                  const unsigned char* rows) {
  const int64_t bits = bits_of(w.coding.code), row_bytes = w.k * bits / 8;
  const int64_t whole = count == kLanes ? w.k / kBlock : 0;
  for (int64_t block = 0; block < whole; ++block) {
    unsigned char* to = panel + layout.codes_at(block);
    if (bits == 8) {
      put_block_of_bytes(to + lane * 2, rows + block * kBlock, row_bytes);
    } else {
      put_block_of_nibbles(to + lane / kLanes * kHalfBytes, rows + block * kBlock / 2, row_bytes);
    }
  }
  for (int64_t i = 0; i < count; ++i) put_codes(w, layout, panel, lane + i, rows + i * row_bytes, whole * kBlock);
}

float from_bf16(const unsigned char* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

float from_f32(const unsigned char* at) {
  float x;
  std::memcpy(&x, at, 4);
  return x;
}

// One output of codes: its panel's block expanded, of which one lane is read.
void unpack_codes(const Weight& w, int64_t output, float* row) {
  const Expander expander(w);
  const Column c = column_of(w, PanelLayout(w), output);
  const bool is_bf16 = w.kind == WeightKind::bf16;
  alignas(64) unsigned char block[kBlock * kPanel * 4];
  for (int64_t begin = 0; begin < w.k; begin += kBlock) {
    expander.block(expander.panel(c.panel), begin / kBlock, block);
    for (int64_t k = 0; k < kBlock && begin + k < w.k; ++k) {
      if (!is_bf16) {
        row[begin + k] = from_f32(block + quad_offset(4 * k, c.lane));
      } else {
        row[begin + k] = from_bf16(block + (kHasTiles ? tile_offset(2 * k, c.lane) : quad_offset(2 * k, c.lane)));
      }
    }
  }
}

}  // namespace
}  // namespace linear

using linear::Column;
using linear::Packer;

int64_t weight_bytes(const Weight& w) {
  // Halves of a gated weight end in panels of their own, so that one may need a panel more.
  const linear::PanelLayout plain(w, false), gated(w, true);
  const int64_t num_panels = plain.num_panels > gated.num_panels ? plain.num_panels : gated.num_panels;
  return num_panels * linear::stored_panel_bytes(w, plain);
}

int64_t pack_granularity() { return linear::kPanel; }

void pack_bf16(const Weight& w, int64_t begin, int64_t count, const uint16_t* rows, int64_t stride) {
  linear::pack_rows_of(w, begin, count, rows, stride);
}

void pack_f32(const Weight& w, int64_t begin, int64_t count, const float* rows, int64_t stride) {
  linear::pack_rows_of(w, begin, count, rows, stride);
}

void pack_integers(const Weight& w, int64_t begin, int64_t count, const int8_t* rows, int64_t stride, const float* scales) {
  linear::pack_numbers(w, begin, count, rows, stride, {nullptr, scales, nullptr, nullptr, nullptr, nullptr});
}

CodedRows rows_from(const Weight& w, const CodedRows& rows, int64_t first) {
  const linear::SetLayout layout(w);
  const bool in_nibbles = w.kind == WeightKind::int4 || linear::in_nibbles(w.coding.code);
  const int64_t set = first * (w.group > 0 ? w.k / w.group : 1);
  const int64_t factor = first * (w.coding.scale_group > 0 ? w.k / w.coding.scale_group : 0);
  const auto from = [](const void* all, int64_t index, int64_t num_bytes) -> const void* {
    return all == nullptr ? nullptr : static_cast<const char*>(all) + index * num_bytes;
  };
  return {rows.codes + first * w.k / (in_nibbles ? 2 : 1),
          from(rows.scales, set, layout.scale_bytes),
          static_cast<const int8_t*>(from(rows.zeros, set, 1)),
          from(rows.offsets, set, layout.offset_bytes),
          static_cast<const uint16_t*>(from(rows.factors, factor, 2)),
          static_cast<const uint16_t*>(from(rows.offset_factors, factor, 2))};
}

void pack_codes(const Weight& w, int64_t begin, int64_t count, const CodedRows& rows) {
  if (w.coding.code == Code::none) return linear::pack_integers(w, begin, count, rows);
  const linear::CodedLayout layout(w);
  const linear::PanelLayout panels(w);
  const int64_t row_bytes = w.k * linear::bits_of(w.coding.code) / 8;
  const int64_t num_stored = w.group > 0 ? w.k / w.group : 1;
  for (int64_t done = 0, num_rows; done < count; done += num_rows) {
    const Column column = linear::column_of(w, panels, begin + done);
    num_rows = linear::fills_half(w, column, begin + done, count - done) ? kLanes : 1;
    unsigned char* panel = w.data + column.panel * layout.panel_bytes;
    linear::put_codes_of(w, layout, panel, column.lane, num_rows, rows.codes + done * row_bytes);
    for (int64_t set = 0; set < num_stored * layout.repeats; ++set) {
      const int64_t from = done * num_stored + set / layout.repeats;
      for (int64_t i = 0; i < num_rows; ++i) {
        linear::put_set(w, layout.sets, panel + layout.set_at(set), column.lane + i, rows, from + i * num_stored);
      }
    }
    for (int64_t i = 0; i < num_rows; ++i) linear::put_factors(w, layout.sets, panel, column.lane + i, rows, done + i);
  }
}

void unpack_row(const Weight& w, int64_t output, float* row) {
  if (w.coding.code != Code::none) return linear::unpack_codes(w, output, row);
  const Packer packer(w);
  const Column c = linear::column_of(w, packer.panels, output);
  if (linear::is_quantized(w.kind)) return packer.unpack(c, row);
  const unsigned char* from = packer.group(c, 0);
  for (int64_t k = 0; k < w.k; ++k) {
    row[k] = w.kind == WeightKind::bf16 ? linear::from_bf16(from + packer.offset(2 * k, c.lane))
                                        : linear::from_f32(from + packer.offset(4 * k, c.lane));
  }
}

}  // namespace sage
