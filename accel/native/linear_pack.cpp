// Weights into panels and back.
#include <cstring>
#include <vector>

#include "linear_codes.h"
#include "linear_layout.h"

namespace sage {
namespace linear {
namespace {

struct Packer {
  const Weight& w;
  PanelLayout panels;

  explicit Packer(const Weight& weight) : w(weight), panels(weight) {}

  unsigned char* group(Column c, int64_t index) const {
    return w.data + c.panel * panels.panel_bytes + index * panels.group_bytes;
  }
  // What an output has for one group: nothing for a lane without an output.
  void put_set(Column c, int64_t index, const void* scale, const int8_t* zero, const float* offset) const {
    constexpr char none[4] = {};
    unsigned char* to = group(c, index);
    const int64_t scale_bytes = w.coding.has_half_scales ? 2 : 4;
    std::memcpy(to + panels.scales_at + c.lane * scale_bytes, scale != nullptr ? scale : none, static_cast<size_t>(scale_bytes));
    if (w.coding.has_zeros) std::memcpy(to + panels.zeros_at + c.lane, zero != nullptr ? static_cast<const void*>(zero) : none, 1);
    if (w.coding.has_offsets) {
      std::memcpy(to + panels.offsets_at + c.lane * 4, offset != nullptr ? static_cast<const void*>(offset) : none, 4);
    }
  }
  // What a number stands for in the group at `from`.
  float value_of(Column c, const unsigned char* from, int32_t number) const {
    const GroupSet<> set(w, panels, from, c.lane / kLanes);
    const int64_t lane = c.lane % kLanes;
    float scales[kLanes];
    store(scales, set.scale);
    const float value = static_cast<float>(number - (set.zeros != nullptr ? set.zeros[lane] : 0)) * scales[lane];
    return set.offsets != nullptr ? value - set.offsets[lane] : value;
  }
  int64_t offset(int64_t k_byte, int64_t lane) const {
    return in_tiles(w.kind) ? tile_offset(k_byte, lane) : quad_offset(k_byte, lane);
  }

  // `row`: k elements of the weight's width in memory, or null for zeros; those before `begin` are left out.
  template <typename Element>
  void put_plain(Column c, const Element* row, int64_t begin = 0) const {
    unsigned char* to = group(c, 0);
    const int64_t padded = panels.depth.steps_per_group * panels.depth.step;
    constexpr int64_t per_quad = 4 / sizeof(Element);
    for (int64_t k = begin; k < padded; k += per_quad) {
      Element quad[per_quad];
      for (int64_t i = 0; i < per_quad; ++i) quad[i] = row != nullptr && k + i < w.k ? row[k + i] : Element{};
      std::memcpy(to + offset(k * static_cast<int64_t>(sizeof(Element)), c.lane), quad, 4);
    }
  }
  // Rows of a whole half of a panel, whose quads at one k lie side by side: writing these at once is several times
  // as fast as writing row by row, each quad to another line of the cache.
  template <typename Element>
  void put_half(Column first, const Element* rows, int64_t stride) const {
    unsigned char* to = group(first, 0);
    constexpr int64_t per_quad = 4 / sizeof(Element), at_once = kLanes * per_quad;
    const int64_t padded = panels.depth.steps_per_group * panels.depth.step;
    const int64_t whole = w.k / at_once * at_once;
    for (int64_t k = 0; k < whole; k += at_once) {
      for (int64_t quad = 0; quad < kLanes; ++quad) {
        uint32_t line[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          std::memcpy(&line[lane], rows + lane * stride + k + quad * per_quad, 4);
        }
        std::memcpy(to + offset((k + quad * per_quad) * static_cast<int64_t>(sizeof(Element)), first.lane), line,
                    sizeof line);
      }
    }
    if (whole == padded) return;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      put_plain(Column{first.panel, first.lane + lane}, rows + lane * stride, whole);
    }
  }
  // The numbers of one output, or of none. Dot products of bytes take one unsigned operand: without tiles, AVX-512
  // weights are stored as value + 128.
  void put_integers(Column c, const int8_t* row) const {
    const int64_t padded = panels.depth.steps_per_group * panels.depth.step;
    const uint32_t flip = kHasDots && !in_tiles(w.kind) ? 0x80808080u : 0u;
    for (int64_t index = 0; index < panels.depth.num_groups; ++index) {
      unsigned char* to = group(c, index);
      const int64_t begin = panels.depth.begin(index), size = row != nullptr ? panels.depth.size(index) : 0;
      const auto number = [&](int64_t k) { return k < size ? row[begin + k] : int8_t{0}; };
      const auto nibble = [&](int64_t k) { return (number(k) + 8) & 15; };
      if (w.kind == WeightKind::int4) {
        for (int64_t k = 0; k < padded; k += 8) {
          unsigned char* quad = to + nibble_offset(k, c.lane);
          for (int64_t i = 0; i < 4; ++i) quad[i] = static_cast<unsigned char>(nibble(k + i) | nibble(k + 4 + i) << 4);
        }
        continue;
      }
      for (int64_t k = 0; k < padded; k += 4) {
        uint32_t quad = 0;
        if (k + 4 <= size) {
          std::memcpy(&quad, row + begin + k, 4);
        } else {
          const int8_t numbers[4] = {number(k), number(k + 1), number(k + 2), number(k + 3)};
          std::memcpy(&quad, numbers, 4);
        }
        quad ^= flip;
        std::memcpy(to + offset(k, c.lane), &quad, 4);
      }
    }
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

template <typename Element>
void pack_plain(const Weight& w, int64_t begin, int64_t count, const Element* rows, int64_t stride) {
  const Packer packer(w);
  for (int64_t done = 0; done < count;) {
    const int64_t output = begin + done;
    const int64_t end = w.is_gated && output < w.n / 2 ? w.n / 2 : w.n;
    const Column column = column_of(w, packer.panels, output);
    // Not the last of all: behind it there may be lanes to fill with zeros.
    if (column.lane % kLanes == 0 && count - done >= kLanes && end - output > kLanes) {
      packer.put_half(column, rows + done * stride, stride);
      done += kLanes;
      continue;
    }
    each_output(w, packer.panels, output, 1, rows + done * stride, stride,
                [&](Column c, int64_t, const Element* row) { packer.put_plain(c, row); });
    ++done;
  }
}

// Integers that are multiplied as such. `numbers` are a byte each.
void pack_integers(const Weight& w, int64_t begin, int64_t count, const int8_t* numbers, int64_t stride, const CodedRows& sets) {
  const Packer packer(w);
  const int64_t num_groups = packer.panels.depth.num_groups, scale_bytes = w.coding.has_half_scales ? 2 : 4;
  const auto* scales = static_cast<const unsigned char*>(sets.scales);
  each_output(w, packer.panels, begin, count, numbers, stride, [&](Column c, int64_t i, const int8_t* row) {
    packer.put_integers(c, row);
    for (int64_t index = 0; index < num_groups; ++index) {
      const int64_t at = i * num_groups + index;
      if (row == nullptr) {
        packer.put_set(c, index, nullptr, nullptr, nullptr);
      } else {
        packer.put_set(c, index, scales + at * scale_bytes, sets.zeros != nullptr ? sets.zeros + at : nullptr,
                       sets.offsets != nullptr ? sets.offsets + at : nullptr);
      }
    }
  });
}

// The same of codes as they are stored.
void pack_integers(const Weight& w, int64_t begin, int64_t count, const CodedRows& rows) {
  if (w.kind != WeightKind::int4) {
    return pack_integers(w, begin, count, reinterpret_cast<const int8_t*>(rows.codes), w.k, rows);
  }
  std::vector<int8_t> numbers(static_cast<size_t>(count * w.k));
  for (int64_t i = 0; i < count * w.k; i += 2) {
    numbers[static_cast<size_t>(i)] = static_cast<int8_t>((rows.codes[i / 2] & 15) - 8);
    numbers[static_cast<size_t>(i + 1)] = static_cast<int8_t>((rows.codes[i / 2] >> 4) - 8);
  }
  pack_integers(w, begin, count, numbers.data(), w.k, rows);
}

// Writes the codes of one output.
void put_codes(const Weight& w, const CodedLayout& layout, unsigned char* panel, int64_t lane, const unsigned char* row) {
  const int64_t half = lane / kLanes, place = lane % kLanes;
  if (bits_of(w.coding.code) == 8) {
    for (int64_t k = 0; k < w.k; k += 2) {
      const int64_t pair = k % kBlock / 2;
      std::memcpy(panel + layout.codes_at(k / kBlock) + (2 * pair + half) * 2 * kLanes + 2 * place, row + k, 2);
    }
    return;
  }
  const int64_t shift = 4 * (place / (kLanes / 2)), word = 2 * (place % (kLanes / 2));
  const uint32_t kept = ~(0x0f0f0f0fu << shift);
  for (int64_t k = 0; k < w.k; k += 8) {  // the nibbles of four pairs
    uint32_t both, words[2];
    std::memcpy(&both, row + k / 2, 4);
    unsigned char* to = panel + layout.codes_at(k / kBlock) + (k % kBlock / 8 * 2 + half) * kHalfBytes + word * 4;
    std::memcpy(words, to, 8);
    words[0] = (words[0] & kept) | (both & 0x0f0f0f0fu) << shift;
    words[1] = (words[1] & kept) | (both >> 4 & 0x0f0f0f0fu) << shift;
    std::memcpy(to, words, 8);
  }
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
  linear::pack_plain(w, begin, count, rows, stride);
}

void pack_f32(const Weight& w, int64_t begin, int64_t count, const float* rows, int64_t stride) {
  linear::pack_plain(w, begin, count, rows, stride);
}

void pack_integers(const Weight& w, int64_t begin, int64_t count, const int8_t* rows, int64_t stride, const float* scales) {
  linear::pack_integers(w, begin, count, rows, stride, {nullptr, scales, nullptr, nullptr});
}

int64_t coded_bits(const Weight& w) {
  if (w.coding.code == Code::none) return w.kind == WeightKind::int4 ? 4 : 8;
  return linear::bits_of(w.coding.code);
}

void pack_codes(const Weight& w, int64_t begin, int64_t count, const CodedRows& rows) {
  if (w.coding.code == Code::none) return linear::pack_integers(w, begin, count, rows);
  const linear::CodedLayout layout(w);
  const linear::PanelLayout panels(w);
  const int64_t row_bytes = w.k * linear::bits_of(w.coding.code) / 8;
  const int64_t num_stored = w.group > 0 ? w.k / w.group : 1;
  const int64_t scale_bytes = w.coding.has_half_scales ? 2 : 4;
  for (int64_t i = 0; i < count; ++i) {
    const Column column = linear::column_of(w, panels, begin + i);
    unsigned char* panel = w.data + column.panel * layout.panel_bytes;
    linear::put_codes(w, layout, panel, column.lane, rows.codes + i * row_bytes);
    for (int64_t set = 0; set < num_stored * layout.repeats; ++set) {
      unsigned char* to = panel + layout.set_at(set / layout.sets_per_unit, set % layout.sets_per_unit);
      const int64_t from = i * num_stored + set / layout.repeats;
      std::memcpy(to + column.lane * scale_bytes, static_cast<const char*>(rows.scales) + from * scale_bytes, scale_bytes);
      if (w.coding.has_zeros) to[layout.zeros_at + column.lane] = static_cast<unsigned char>(rows.zeros[from]);
      if (w.coding.has_offsets) std::memcpy(to + layout.offsets_at + column.lane * 4, rows.offsets + from, 4);
    }
  }
}

void unpack_row(const Weight& w, int64_t output, float* row) {
  if (w.coding.code != Code::none) return linear::unpack_codes(w, output, row);
  const Packer packer(w);
  const linear::Depth& depth = packer.panels.depth;
  const Column c = linear::column_of(w, packer.panels, output);
  for (int64_t k = 0; k < w.k; ++k) {
    const int64_t index = k / depth.group, inside = k % depth.group;
    const unsigned char* from = packer.group(c, index);
    if (w.kind == WeightKind::bf16) {
      row[k] = linear::from_bf16(from + packer.offset(2 * k, c.lane));
      continue;
    }
    if (w.kind == WeightKind::f32) {
      row[k] = linear::from_f32(from + packer.offset(4 * k, c.lane));
      continue;
    }
    int32_t number;
    if (w.kind == WeightKind::int4) {
      const unsigned char both = from[linear::nibble_offset(inside / 8 * 8 + inside % 4, c.lane)];
      number = (inside % 8 < 4 ? both & 15 : both >> 4) - 8;
    } else {
      const unsigned char flip = linear::kHasDots && !linear::in_tiles(w.kind) ? 0x80 : 0;
      number = static_cast<int8_t>(from[packer.offset(inside, c.lane)] ^ flip);
    }
    row[k] = packer.value_of(c, from, number);
  }
}

}  // namespace sage
