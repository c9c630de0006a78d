"""What one call of KV management costs: `python benchmarks/kv_micro.py [--peer NAME=PYTHON[:DIR]]… [--json]`.

Ours are the modules of the default configuration, as an engine assembles them. Measured are a lookup that
finds all of a path of 8 nodes among 500 other prompts, one that finds nothing, building what is looked up
from a list of ids, allocating and freeing a prompt's blocks, and evicting from many leaves, of one block
each and of 32. A peer, vllm or sglang, runs in its own interpreter, in turn with ours row by row; what
each of its figures contains is printed. The bar is for the p50.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from common import foreign_cores, machine_line, report, spread
from peer import Conversation, Peer
from peers.rounds import Case, Subject
from peers.workload import (
    BLOCK_SIZE,
    LENGTHS,
    NUM_BLOCKS,
    NUM_NODES,
    fresh,
    hit,
    misses,
    others,
    path,
    resident,
)
from rich.console import Console
from rich.progress import Progress

from sagellm.core import BlockAllocationRequest, BlockId, PluginRegistry, SequenceId, SystemClock, pack
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.engine_core.kv_modules import KVModules, build_kv
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.modules import Modules

NUM_CALLS = 10_000
BARS_US: dict[str, dict[int, float]] = {
    "match": dict(zip(LENGTHS, (4, 5, 7, 15), strict=True)),
    "miss": dict(zip(LENGTHS, (3, 3, 3, 5), strict=True)),
    "key": dict(zip(LENGTHS, (5, 20, 75, 300), strict=True)),
    "key + match": dict(zip(LENGTHS, (9, 25, 82, 315), strict=True)),
    "allocate": dict(zip(LENGTHS, (4, 9, 28, 105), strict=True)),
    "free": dict(zip(LENGTHS, (4, 9, 28, 105), strict=True)),
    "evict 1": {8_000: 5, 100_000: 5},
    "evict 512": {8_000: 2_560},
    "evict 512 of 32": {8_000: 2_560},
}
"""By row and size: the tokens of a prompt, or the leaves that can be evicted, of 1 block or of 32.

5 µs a block is the bar of every policy but lru, whose 2 µs `eviction_cost.py` measures.
"""

ABOUT = {
    "match, miss": "PrefixCache.match_prefix of packed tokens",
    "key": "pack of a list",
    "allocate, free": "KVPool.allocate, free",
    "evict": "PrefixCache.evict; the pool takes the blocks back by free",
}


def request(num_blocks: int) -> BlockAllocationRequest:
    """Ask for blocks."""
    return BlockAllocationRequest(num_blocks=num_blocks, sequence_id=SequenceId("measured"))


class Ours:
    """The modules of the default configuration, or of the same with another eviction policy."""

    def __init__(self, eviction_policy: str | None = None) -> None:
        chosen = {} if eviction_policy is None else {"eviction_policy": eviction_policy}
        self.config = EngineConfig.from_flat(**chosen)
        self.kv = self.build(NUM_BLOCKS)
        self.numbers = itertools.count()
        for prompt in itertools.chain(others(), *map(resident, LENGTHS)):
            self.insert(self.kv, prompt)

    def build(self, num_blocks: int) -> KVModules:
        """Make cache, pool and eviction policy as an engine does."""
        seats = Seats(256, block_size=BLOCK_SIZE)
        return build_kv(Modules(PluginRegistry.load(), self.config), seats, num_blocks, SystemClock())

    @staticmethod
    def insert(kv: KVModules, prompt: list[int]) -> None:
        """Cache the blocks of a prompt that are not cached yet."""
        tokens = pack(prompt)
        held = kv.cache.match_prefix(tokens).block_ids
        asked = request(len(tokens) // BLOCK_SIZE - len(held))
        kv.cache.insert_prefix(tokens, [*held, *kv.pool.allocate(asked)])

    def match(self, length: int) -> Case:
        """Match the resident path."""
        tokens = pack(hit(length))
        found = self.kv.cache.match_prefix(tokens)
        num_nodes = len(found.node.path())  # type: ignore[union-attr]  # a PrefixNode
        assert (found.match_length, num_nodes) == (length, NUM_NODES), found
        return Case(lambda _: self.kv.cache.match_prefix(tokens))

    def miss(self, length: int) -> Case:
        """Match prompts that are not there."""
        prompts = itertools.cycle([pack(prompt) for prompt in misses(length)])
        return Case(self.kv.cache.match_prefix, lambda: next(prompts))

    def key(self, length: int) -> Case:
        """Pack a list."""
        ids = path(length)
        return Case(lambda _: pack(ids))

    def key_and_match(self, length: int) -> Case:
        """Pack a list and match it."""
        ids = path(length)
        return Case(lambda _: self.kv.cache.match_prefix(ids))

    def allocate(self, length: int) -> Case:
        """Allocate a prompt's blocks."""
        asked = request(length // BLOCK_SIZE)
        return Case(lambda _: self.kv.pool.allocate(asked), after=self.kv.pool.free)

    def free(self, length: int) -> Case:
        """Give a prompt's blocks back."""
        asked = request(length // BLOCK_SIZE)
        return Case(self.kv.pool.free, lambda: self.kv.pool.allocate(asked))

    def evict(self, num_blocks: int, num_leaves: int, leaf_blocks: int) -> Case:
        """Evict from a tree of leaves of equal size, which is full again before the next call."""
        total = num_leaves * leaf_blocks
        cache = self.build(total).cache

        def fill(block_ids: list[BlockId]) -> None:
            for begin in range(0, len(block_ids), leaf_blocks):
                prompt = fresh(leaf_blocks * BLOCK_SIZE, next(self.numbers))
                cache.insert_prefix(prompt, block_ids[begin : begin + leaf_blocks])

        fill([BlockId(index) for index in range(total)])
        return Case(lambda _: cache.evict(num_blocks), after=fill)


def measure(
    ours: dict[str, Subject], peers: list[Conversation], options: argparse.Namespace
) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Return by row and size each subject's spread in µs, all in turn in each round."""
    took: dict[tuple[str, int], dict[str, list[float]]] = {
        (row, size): {} for row, bars in BARS_US.items() for size in bars
    }
    num_calls = -(-NUM_CALLS // options.rounds)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("rows", total=options.rounds * len(took))
        for _ in range(options.rounds):
            for (row, size), found in took.items():
                limit_s = options.seconds / options.rounds
                answers = {
                    name: subject.measure(row, size, num_calls, 2 * limit_s)
                    for name, subject in ours.items()
                    if name == "ours" or row.startswith("evict")
                }
                answers |= {peer.name: peer.ask(row, size, num_calls, limit_s) for peer in peers}
                for name, times_ns in answers.items():
                    if times_ns is not None:
                        found.setdefault(name, []).extend(time_ns / 1e3 for time_ns in times_ns)
                progress.update(bar, advance=1)
    return {key: {name: spread(us, 2) for name, us in found.items()} for key, found in took.items()}


def table(figures: dict[tuple[str, int], dict[str, dict[str, Any]]], names: list[str]) -> str:
    """Lay out ours with its bar, then each peer's p50."""
    head = ("CALL", "SIZE", "MIN", "P50", "P99", "CALLS", "BAR", "", *(f"{name} P50" for name in names))
    rows = []
    for (row, size), found in figures.items():
        ours, bar = found["ours"], BARS_US[row][size]
        cells = [row, f"{size:,}", *(f"{ours[key]:.1f}" for key in ("min", "median", "p99"))]
        cells += [f"{ours['n']:,}", f"{bar:,}", "" if ours["median"] < bar else "missed"]
        rows.append(cells + [f"{found[name]['median']:,.1f}" if name in found else "-" for name in names])
    return columns(head, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Peer.parse, action="append", default=[], metavar="NAME=PYTHON[:DIR]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="a peer's most for a row; ours has twice that"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peers = [Conversation(peer, "kv") for peer in options.peer]
    ours = {"ours": Subject(Ours()), "ours, lru": Subject(Ours("lru"))}
    about = {
        "ours": ABOUT,
        "ours, lru": {"evict": "the same with the eviction policy lru"},
        **{peer.name: peer.hear() for peer in peers},
    }
    others_busy = foreign_cores()
    figures = measure(ours, peers, options)
    for peer in peers:
        peer.end()
    if options.json:
        rows = [
            {"call": row, "size": size, "bar_us": BARS_US[row][size], "us": found}
            for (row, size), found in figures.items()
        ]
        report("kv_micro", foreign_cores=others_busy, block_size=BLOCK_SIZE, about=about, rows=rows)
        return
    print("µs a call; sizes are tokens of a prompt, or leaves of 1 block, or of 32 where the row says so")
    print(f"other processes kept {others_busy} cores busy before the run")
    print(f"{machine_line()}\n\n{table(figures, ['ours, lru', *(peer.name for peer in peers)])}")
    for name, contents in about.items():
        print(f"\n{name}\n" + "\n".join(f"  {row}: {what}" for row, what in contents.items()))


if __name__ == "__main__":
    main()
