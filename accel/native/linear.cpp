// How a product is cut into parts, and which kernel computes them.
#include "linear.h"

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

void multiply_part(const Product& p, const Part& part) {
#if defined(__AMX_TILE__)
  if (takes_tiles(p)) {
    multiply_tiles(p, part);
    return;
  }
#endif
  multiply_rows(p, part);
}

// Row groups whose activations stay in L2 while panels go by.
int64_t row_groups_at_once(const Product& p) {
#if defined(__AMX_TILE__)
  if (takes_tiles(p)) return kRowGroupsAtOnce;
#endif
  const int64_t fitting = (256 << 10) / p.input.row_group_bytes();
  return fitting > 0 ? fitting : 1;
}

// Enough parts that no member waits long at the end, each long enough to stream: memory reaches its rate from about
// 256 KiB on.
int64_t panels_at_once(const Product& p, int64_t num_chunks, int team_size) {
  int64_t count = p.panels.num_panels * num_chunks / (8 * team_size);
  const int64_t streaming = ceil_div(256 << 10, p.panels.panel_bytes);
  if (p.input.num_row_groups == 1 && count < streaming) count = streaming;
#if defined(__AMX_TILE__)
  if (p.input.num_row_groups > 1 && count > kPanelsAtOnce) count = kPanelsAtOnce;
#endif
  const int64_t fair = ceil_div(p.panels.num_panels, team_size);
  if (count > fair) count = fair;
  return count > 0 ? count : 1;
}

}  // namespace
}  // namespace linear

void multiply(Team& team, const Weight& weight, const Input& input, Into into, float* out, int64_t stride) {
  using namespace linear;
  const Product p(weight, input, into, out, stride);
  const int64_t num_groups = p.input.num_row_groups;
  if (num_groups == 0) return team.barrier();
  // Chunks of rows as equal as their row groups allow.
  const int64_t num_chunks = ceil_div(num_groups, row_groups_at_once(p));
  const int64_t chunk = ceil_div(num_groups, num_chunks);
  const int64_t panels = panels_at_once(p, num_chunks, team.size());
  const int64_t pieces = ceil_div(p.panels.num_panels, panels);
  team.share(num_chunks * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / pieces * chunk, panel = i % pieces * panels;
      const Part part{panel, panel + panels < p.panels.num_panels ? panel + panels : p.panels.num_panels, group,
                      group + chunk < num_groups ? group + chunk : num_groups};
      multiply_part(p, part);
    }
  });
}

}  // namespace sage
