// Chooses a token for each row of logits: the largest, or a draw from what temperature, min-p, top-k and top-p keep.
#pragma once
#include <cstdint>

#include "sage.h"
#include "team.h"

namespace sage {

// The number in [0, 1) of a key at a position: 53 bits of Philox4x32 with 10 rounds (Salmon et al., SC 2011).
double uniform(uint64_t key, uint64_t position);

int64_t draw_scratch_bytes(int64_t vocab, int num_threads);

// A row's token depends on its logits and settings alone. Nothing is sorted but what lies at a border: a row is
// read once for its largest logits, once more for its weights unless only the largest count, and with top-p a third
// time for what lies near the border. A row stays in the cache between these, and the next one is fetched meanwhile.
void draw_tokens(Team&, const SageDraw&);

}  // namespace sage
