"""What do execution graphs cost a step? `python benchmarks/lowering.py`: microseconds, by number of decodes.

`plain` is what a worker spends on a step without transfers that nobody watches; `copy` lowers a step with one
copy, as whenever a prompt reuses a part of a block; `traced` lowers with an estimate; `watched` also looks up
the blocks of contexts of 1,000 tokens.
"""

from __future__ import annotations

import argparse
import timeit
from dataclasses import replace

import numpy as np
from common import foreign_cores, output_flags, publish, spread

from sagellm.core import BlockId, KVGroup, KVLayout, StepCost, StepInput
from sagellm.core.protocols.step import CopyBlocks
from sagellm.engines.cli.output import columns
from sagellm.engines.worker.execution_graph import lower_step
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.step_graphs import StepGraphs

LAYOUT = KVLayout(group=KVGroup(layer_ids=tuple(range(28)), num_kv_heads=8, head_dim=128))
NUM_CONTEXT, REPEATS, CALLS = 1000, 25, 200


def measure(num_rows: int) -> dict[str, dict[str, float]]:
    """Return microseconds of each way for a step of this many decodes."""
    ones = np.ones(num_rows, np.int32)
    step = StepInput(
        step=1,
        seats=np.arange(num_rows, dtype=np.int32),
        num_new=ones,
        starts=NUM_CONTEXT * ones,
        is_sampled=ones > 0,
    )
    copying = replace(step, kv_ops=[CopyBlocks([(BlockId(1), BlockId(2))])])
    width = NUM_CONTEXT // LAYOUT.block_size + 1
    tables = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    cost = StepCost(base_ns=1e6, token_ns=1e5)
    graphs = StepGraphs(SeatState(num_rows, block_size=LAYOUT.block_size), LAYOUT)

    def plain() -> None:
        graphs.begin(step)
        with graphs.forward(), graphs.sample():
            pass

    ways = {
        "plain": plain,
        "copy": lambda: graphs.begin(copying),
        "traced": lambda: lower_step(step, layout=LAYOUT, cost=cost),
        "watched": lambda: lower_step(step, layout=LAYOUT, tables=tables, cost=cost),
    }
    return {
        name: spread([1e6 * each / CALLS for each in timeit.repeat(way, number=CALLS, repeat=REPEATS)], 2)
        for name, way in ways.items()
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output_flags(parser, "lowering")
    options = parser.parse_args()
    foreign = foreign_cores()
    found = {num_rows: measure(num_rows) for num_rows in (1, 32, 256)}
    text = columns(
        ["sequences", *next(iter(found.values()))],
        [
            [str(num_rows), *(f"{each['min']:.1f} ({each['median']:.1f})" for each in ways.values())]
            for num_rows, ways in found.items()
        ],
    )
    publish("lowering", f"µs, min (median)\n{text}", options, foreign_cores=foreign, microseconds=found)


if __name__ == "__main__":
    main()
