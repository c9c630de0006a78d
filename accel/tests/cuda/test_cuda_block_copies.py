"""Copies of blocks in one launch give what copies one after the other do."""

from __future__ import annotations

import pytest
import torch

from sagellm.accel.cuda import block_copies
from sagellm.accel.cuda.block_copies import copy_blocks, independent_runs
from sagellm.accel.cuda.support import IS_INTERPRETED

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.mark.parametrize(
    ("pairs", "num_launches"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (2, 3), (4, 5)], 1),
        ([(0, 1), (0, 2), (0, 3)], 1),  # one block, copied to many
        ([(0, 1), (1, 2), (2, 3)], 3),  # a chain
        ([(2, 3), (1, 2), (0, 1)], 3),  # a shift, in which a block is read before it is overwritten
        ([(0, 7), (1, 0), (7, 1)], 3),  # a swap
        ([(0, 1), (2, 1)], 2),  # the later one remains
        ([(0, 1), (2, 3), (3, 4), (5, 6)], 2),
    ],
)
@pytest.mark.parametrize("num_bytes", [64, 20_004])
def test_copies_are_those_made_one_after_the_other(monkeypatch, pairs, num_launches, num_bytes):
    generator = torch.Generator().manual_seed(num_bytes)
    memory = torch.randint(0, 256, (8, num_bytes), dtype=torch.uint8, generator=generator)
    expected = memory.clone()
    for source, target in pairs:
        expected[target] = expected[source]
    launches = []
    launch = block_copies._launch
    monkeypatch.setattr(block_copies, "_launch", lambda *given: launches.append(given) or launch(*given))
    copied = memory.to(DEVICE)
    copy_blocks(copied, pairs)
    assert torch.equal(copied.cpu(), expected)
    assert len(launches) == num_launches


def test_runs_cover_all_pairs_in_order():
    pairs = [(each % 5, (3 * each + 1) % 7) for each in range(40)]
    runs = list(independent_runs(pairs))
    assert [pair for run in runs for pair in pairs[run]] == pairs
    for run in runs:
        written = [target for _, target in pairs[run]]
        assert len(set(written)) == len(written)
        for place, (source, _) in enumerate(pairs[run]):
            assert source not in written[:place] + written[place + 1 :]
