"""What do pieces of three sizes in one pool bring against blocks of one size?

`python benchmarks/granularity.py [--json]`: `MultiGranularKVPool` (pieces of 1,024, 16 and 1 tokens), as it
is and compacted, beside `PagedKVPool` with blocks of 16, 1,024 and 4,096; a million tokens each and the same
load: sequences of tens of tokens, of about 1,000 and of about 32,000, as many tokens of each kind. A queue
always waits; its first enters as soon as it fits under a share of the pool, and until then one of those
inside, by lot, moves on: it gets more of its tokens or, having all, leaves.

`whole`: all tokens from the first, up to 95 % of the pool. `growing`: half of them from the first, the others
16 at a time; where these do not fit, another by lot leaves. `full`: as `whole`, up to all of the pool.

Taken every 20 arrivals from the first that waited (METRICS.md's formulas, in tokens):
internal fragmentation = 1 - tokens stored ÷ tokens allocated,
external fragmentation = 1 - largest free run ÷ free tokens, 0 when nothing is free; total is their sum.
`compacted` moves pieces after such a look if external fragmentation is above 10 % and so much is free that
moves can bring it below, so that its figures are those before its moves; `moved_share` is tokens moved ÷
tokens ever stored. Pieces are entries of a sequence's table, runs those that do not follow the one before.
No pool needs a run, each gives what is free wherever it lies; what nobody can use is `unused`,
1 - tokens stored ÷ tokens of the pool. Times are those of the bookkeeping: no KV is stored, and none moved.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from common import report, spread
from token_pools import PAGE, POOLS, TOTAL_TOKENS, Pool

from sagellm.core import OutOfBlocksError

KINDS = {"short": (20, 100), "1k": (512, 1536), "32k": (24_576, 40_960)}  # tokens, each length as likely
LOADS = {"whole": (0.95, 1), "growing": (0.95, 2), "full": (1.0, 1)}
"""The share of the pool that those who enter may fill, and by what their tokens are divided when they do."""
SAMPLE_EVERY = 20  # arrivals
NUM_GROWTHS = 8  # from half of a sequence to all of it


@dataclass
class Live:
    """A sequence in the pool."""

    kind: str
    num_tokens: int
    num_stored: int
    table: list[Any]
    num_allocated: int


@dataclass
class Load:
    """Sequences that come, grow and go in one pool, and what is seen of it."""

    pool: Pool
    rng: random.Random
    room: int  # tokens that may be live at once
    live: list[Live] = field(default_factory=list)
    num_stored: int = 0
    num_allocated: int = 0
    num_driven_out: int = 0
    num_stored_ever: int = 0
    num_moved: int = 0
    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    times_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def enter(self, kind: str, num_tokens: int, num_first: int) -> bool:
        """Let a sequence in, and say whether it had to wait."""
        has_waited = False
        sequence = Live(kind, num_tokens, 0, [], 0)
        while self.num_stored + num_first > self.room or not self._allocate(
            sequence, num_first, f"allocate {kind}"
        ):
            has_waited = True
            self._move_one()
        self._store(sequence, num_first)
        self.live.append(sequence)
        return has_waited

    def look(self) -> None:
        """Note the state of the pool."""
        internal = 1 - self.num_stored / self.num_allocated
        external = self.pool.external_fragmentation()
        figures = {
            "internal_fragmentation": internal,
            "external_fragmentation": external,
            "total_fragmentation": internal + external,
            "unused": 1 - self.num_stored / TOTAL_TOKENS,
            "free": 1 - self.num_allocated / TOTAL_TOKENS,
            "sequences": len(self.live),
        }
        pieces = defaultdict(list)
        runs = defaultdict(list)
        for sequence in self.live:
            ranges = [self.pool.range_of(piece) for piece in sequence.table]
            pieces[sequence.kind].append(len(ranges))
            cuts = sum(before[1] != after[0] for before, after in pairwise(ranges))
            runs[sequence.kind].append(1 + cuts)
        figures |= {f"pieces {kind}": statistics.mean(found) for kind, found in pieces.items()}
        figures |= {f"runs {kind}": statistics.mean(found) for kind, found in runs.items()}
        for name, value in figures.items():
            self.seen[name].append(value)

    def tidy(self) -> None:
        """Let the pool move what lies badly."""
        begin_ns = time.perf_counter_ns()
        num_moved = self.pool.tidy([sequence.table for sequence in self.live])
        if num_moved:
            self.times_us["compact"].append((time.perf_counter_ns() - begin_ns) / 1000)
            self.num_moved += num_moved

    def _move_one(self) -> None:
        sequence = self._take_one()
        missing = sequence.num_tokens - sequence.num_stored
        if not missing:
            self._leave(sequence)
            return
        for _ in range(0, min(missing, sequence.num_tokens // 2 // NUM_GROWTHS + 1), PAGE):
            num_more = min(PAGE, sequence.num_tokens - sequence.num_stored)
            short = sequence.num_stored + num_more - sequence.num_allocated
            while short > 0 and not self._allocate(sequence, PAGE, "allocate 16 more"):
                self.num_driven_out += 1
                self._leave(self._take_one())
            self._store(sequence, num_more)
        self.live.append(sequence)

    def _take_one(self) -> Live:
        place = self.rng.randrange(len(self.live))
        self.live[place], self.live[-1] = self.live[-1], self.live[place]
        return self.live.pop()

    def _store(self, sequence: Live, num_tokens: int) -> None:
        sequence.num_stored += num_tokens
        self.num_stored += num_tokens
        self.num_stored_ever += num_tokens

    def _allocate(self, sequence: Live, num_tokens: int, name: str) -> bool:
        begin_ns = time.perf_counter_ns()
        try:
            pieces = self.pool.allocate(num_tokens)
        except OutOfBlocksError:
            return False
        self.times_us[name].append((time.perf_counter_ns() - begin_ns) / 1000)
        ranges = map(self.pool.range_of, pieces)
        num_allocated = sum(stop - start for start, stop in ranges)
        sequence.table += pieces
        sequence.num_allocated += num_allocated
        self.num_allocated += num_allocated
        return True

    def _leave(self, sequence: Live) -> None:
        begin_ns = time.perf_counter_ns()
        self.pool.free(sequence.table)
        self.times_us[f"free {sequence.kind}"].append((time.perf_counter_ns() - begin_ns) / 1000)
        self.num_stored -= sequence.num_stored
        self.num_allocated -= sequence.num_allocated


def run_load(name: str, load_name: str, num_arrivals: int, seed: int) -> dict[str, Any]:
    """Let so many sequences enter one after the other, and say what was seen."""
    share, divisor = LOADS[load_name]
    load = Load(POOLS[name](), random.Random(seed), round(share * TOTAL_TOKENS))
    arrivals = random.Random(seed)  # the same for every pool
    weights = [2 / sum(lengths) for lengths in KINDS.values()]  # as many tokens of each kind
    is_full = False
    for number in range(num_arrivals):
        (kind,) = arrivals.choices(list(KINDS), weights)
        num_tokens = arrivals.randint(*KINDS[kind])
        is_full |= load.enter(kind, num_tokens, num_tokens // divisor)
        if is_full and number % SAMPLE_EVERY == 0:
            load.look()
            load.tidy()
    load.pool.check_integrity()
    return {
        "pool": name,
        "load": load_name,
        **{figure: round(statistics.mean(values), 4) for figure, values in load.seen.items()},
        "samples": len(load.seen["unused"]),
        "driven_out": load.num_driven_out,
        "moved_share": round(load.num_moved / load.num_stored_ever, 4),  # of the tokens ever stored
        **{f"{call}_us": spread(values, digits=2) for call, values in sorted(load.times_us.items())},
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the figures for people; of times minimum, median and p99."""
    from rich.console import Console
    from rich.table import Table

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return " ".join(f"{value[key]:g}" for key in ("min", "median", "p99"))
        return str(value)

    for load in LOADS:
        chosen = [row for row in rows if row["load"] == load]
        table = Table("figure", *(row["pool"] for row in chosen), title=load)
        for name in dict.fromkeys(name for row in chosen for name in list(row)[2:]):
            table.add_row(name, *(text(row.get(name, "")) for row in chosen))
        Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-arrivals", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [run_load(name, load, options.num_arrivals, options.seed) for load in LOADS for name in POOLS]
    if options.json:
        report("granularity", total_tokens=TOTAL_TOKENS, seed=options.seed, kinds=KINDS, rows=rows)
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
