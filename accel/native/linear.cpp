// How a product is cut into parts, and which kernel computes them.
#include "linear.h"

#include "linear_codes.h"
#include "linear_layout.h"

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>

#include "linear_amx.h"
#endif
#if defined(__AVX512BF16__)
#include "linear_avx512.h"
#else
#include "linear_avx2.h"
#endif

namespace sage {
namespace linear {
namespace {

#if defined(__AMX_TILE__)
// Linux gives a process the tiles only when it asks. Once, as the library is loaded, for all threads to come.
[[maybe_unused]] const long kTilesAllowed = [] {
  constexpr int request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data);
}();

bool takes_tiles(const Product& p) {
  return in_tiles(p.weight.kind) || (p.weight.kind == WeightKind::int4 && p.input.rows > 8);
}
#endif

void multiply_plain(const Product& p, const Part& part) {
#if defined(__AMX_TILE__)
  if (takes_tiles(p)) {
    multiply_tiles(p, part);
    return;
  }
#endif
  multiply_rows(p, part);
}

// Panel by panel: codes become a panel of the kind, which stays in L2 while its row groups go by.
void multiply_codes(const Product& p, const Part& part) {
  const Expander expander(p.weight);
#if defined(__AMX_TILE__)
  if (takes_tiles(p) && p.input.num_row_groups == 1) return multiply_tiles(p, part, &expander);
#elif defined(__AVX512BF16__)
  if (p.weight.kind == WeightKind::bf16 && p.input.rows <= kRowsOfCodes) return multiply_codes_in_registers(p, part);
#endif
  static thread_local Scratch scratch;
  unsigned char* memory = scratch.get(expander.num_blocks() * expander.block_bytes());
  Product expanded = p;
  expanded.expanded = memory;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    expander.whole(expander.panel(panel), memory);
    multiply_plain(expanded, {panel, panel + 1, part.group_begin, part.group_end});
  }
}

void multiply_part(const Product& p, const Part& part) {
  p.weight.coding.code == Code::none ? multiply_plain(p, part) : multiply_codes(p, part);
}

// Row groups whose activations stay in L2 while panels go by.
int64_t row_groups_at_once(const Product& p) {
#if defined(__AMX_TILE__)
  if (takes_tiles(p)) return row_groups_in_l2(p.input.depth.num_steps());
#endif
  const int64_t fitting = (256 << 10) / p.input.row_group_bytes();
  return fitting > 0 ? fitting : 1;
}

// A piece streams at the memory's rate from about this size on; teams take larger ones while much is left.
constexpr int64_t kStreamBytes = 128 << 10;

// With several chunks of rows: enough pieces that no member waits long for another's last one.
int64_t panels_at_once(const Product& p, int64_t num_chunks, int team_size) {
  int64_t count = p.panels.num_panels * num_chunks / (8 * team_size);
#if defined(__AMX_TILE__)
  if (count > kPanelsAtOnce) count = kPanelsAtOnce;
#endif
  return count > 0 ? count : 1;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

void run(Team& team, const Product& p) {
  const int64_t num_groups = p.input.num_row_groups;
  if (num_groups == 0) return team.barrier();
  const int64_t num_panels = p.panels.num_panels;
  if (num_groups == 1) {
    const int64_t grain = ceil_div(kStreamBytes, stored_panel_bytes(p.weight, p.panels));
    team.share(num_panels, smaller(grain, ceil_div(num_panels, team.size())),
               [&](int64_t begin, int64_t end) { multiply_part(p, {begin, end, 0, 1}); });
    return;
  }
  // Chunks of rows as equal as their row groups allow, and within each of them pieces of panels.
  const int64_t num_chunks = ceil_div(num_groups, row_groups_at_once(p));
  const int64_t chunk = ceil_div(num_groups, num_chunks);
  const int64_t panels = panels_at_once(p, num_chunks, team.size());
  const int64_t pieces = ceil_div(num_panels, panels);
  team.share(num_chunks * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / pieces * chunk, panel = i % pieces * panels;
      multiply_part(p, {panel, smaller(panel + panels, num_panels), group, smaller(group + chunk, num_groups)});
    }
  });
}

}  // namespace
}  // namespace linear

void multiply(Team& team, const Weight& weight, const Input& input, Into into, float* out, int64_t stride) {
  linear::run(team, linear::Product(weight, input, into, out, stride));
}

bool can_feed(const Weight& weight, WeightKind next) {
  return weight.is_gated && !linear::is_quantized(next) && weight.n / 2 % linear::Depth(next, weight.n / 2, 0).step == 0;
}

void multiply_into_input(Team& team, const Weight& weight, const Input& input, const Input& next) {
  const linear::Next target(next);
  linear::Product p(weight, input, Into::store, nullptr, 0);
  p.next = &target;
  linear::run(team, p);
}

}  // namespace sage
