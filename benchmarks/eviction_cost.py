"""What an eviction costs: `python benchmarks/eviction_cost.py`, every installed policy in the real cache.

Evict: the wall time of `RadixPrefixCache.evict(1)`, and of `evict(16)` by block, with 100,000 leaves of
one block and of four, refilled when a tenth is gone; eight tenants; the ghosts that are the default, and
none. Select: `select_victims` for 64 blocks of 1,000 sequences with 1 to 16 blocks each. `belady` only
replays, and `null` evicts nothing.
"""

from __future__ import annotations

import argparse
import gc
import struct
import time
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

from common import foreign_cores, output_flags, publish, spread

from sagellm.core import (
    BlockId,
    EvictionCandidate,
    EvictionPolicyProtocol,
    Namespace,
    PluginRegistry,
    ProviderSpec,
    SequenceId,
    VirtualClock,
)
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.modules import Modules
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

BLOCK_SIZE = 16
NOT_MEASURED = ("belady", "null")
LRU_LIMIT_US, LIMIT_US, SELECT_LIMIT_US = 2.0, 5.0, 100.0


def policies() -> dict[str, Modules]:
    """Name every installed policy that an engine can use."""
    registry = PluginRegistry.load()
    names = [entry.provider.name for entry in registry.providers("eviction_policy")]
    modules = Modules(registry, EngineConfig())
    return {name: modules for name in names if name not in NOT_MEASURED}


class Leaves:
    """A cache of leaves that have nothing in common; a tenth of them was used a second time."""

    def __init__(
        self, policy: EvictionPolicyProtocol, num_leaves: int, leaf_blocks: int, max_ghosts: int | None
    ) -> None:
        self.clock = VirtualClock()
        self.cache = RadixPrefixCache(
            num_leaves * leaf_blocks,
            BLOCK_SIZE,
            eviction_policy=policy,
            clock=self.clock,
            max_ghost_blocks=max_ghosts,
        )
        self.leaf_blocks = leaf_blocks
        self.numbers = count()
        self.random = Random(0)
        self.free = [BlockId(number) for number in range(num_leaves * leaf_blocks)]
        self.fill()

    def fill(self) -> None:
        """Insert until it is full, a millisecond apart."""
        while self.free:
            self.clock.advance_ns(1_000_000)
            number = next(self.numbers)
            tokens = struct.pack("ii", number, 1) * (BLOCK_SIZE * self.leaf_blocks // 2)
            ids = [token for (token,) in struct.iter_unpack("i", tokens)]
            blocks = [self.free.pop() for _ in range(min(self.leaf_blocks, len(self.free)))]
            ids = ids[: BLOCK_SIZE * len(blocks)]
            namespace = Namespace(tenant=str(number % 8))
            self.cache.insert_prefix(ids, blocks, namespace)
            if self.random.random() < 0.1:
                match = self.cache.match_prefix(ids, namespace)
                self.cache.unlock(self.cache.lock(match, num_lookup_tokens=len(ids)))

    def evict(self, num_calls: int, num_blocks: int) -> Iterator[float]:
        """Yield microseconds a block; the cache stays between nine tenths full and full."""
        num_leaves = self.cache.max_blocks // 10
        for _ in range(num_calls):
            if len(self.free) + num_blocks > num_leaves:
                self.fill()
                gc.collect()
            start = time.perf_counter_ns()
            dropped = self.cache.evict(num_blocks)
            elapsed = time.perf_counter_ns() - start
            self.free += dropped
            yield elapsed / 1e3 / num_blocks


def cost(modules: Modules, name: str, num_leaves: int, leaf_blocks: int, *, ghosts: bool) -> dict[str, Any]:
    """Measure 10,000 calls of each kind after 1,000 that are not counted."""
    made = modules.eviction_policy(ProviderSpec(name))
    leaves = Leaves(made, num_leaves, leaf_blocks, None if ghosts else 0)
    list(leaves.evict(1000, 1))
    figures = {
        "policy": name,
        "leaf_blocks": leaf_blocks,
        "ghosts": ghosts,
        "evict_1_us": spread(list(leaves.evict(10_000, 1))),
        "evict_16_us_a_block": spread(list(leaves.evict(10_000, 16))),
    }
    assert leaves.cache._tree.leaves.policy is made, "the policy failed and was replaced"
    return figures


def select_cost(modules: Modules, name: str) -> dict[str, Any]:
    """Measure 10,000 calls."""
    random = Random(0)
    candidates = [
        EvictionCandidate(
            sequence_id=SequenceId(str(number)),
            block_ids=[BlockId(16 * number + index) for index in range(random.randrange(1, 17))],
            last_access_time=random.random() * 1e5,
            access_count=random.randrange(5),
            is_pinned=random.random() < 0.05,
            estimated_lifetime=random.choice((None, 200.0 * random.random())),
            tenant=str(random.randrange(8)),
        )
        for number in range(1000)
    ]
    policy = modules.eviction_policy(ProviderSpec(name))
    durations = []
    for _ in range(10_000):
        start = time.perf_counter_ns()
        policy.select_victims(candidates, 64)
        durations.append((time.perf_counter_ns() - start) / 1e3)
    return {"policy": name, "select_victims_us": spread(durations)}


def as_text(evictions: list[dict[str, Any]], selections: list[dict[str, Any]]) -> str:
    """Show both tables; an exclamation mark stands where the median misses its limit."""
    rows = []
    for one in evictions:
        limit = LRU_LIMIT_US if one["policy"] == "lru" else LIMIT_US
        spreads = (one["evict_1_us"], one["evict_16_us_a_block"])
        cells = [
            f"{spread['median']:.2f} / {spread['p99']:.2f}{'!' * (spread['median'] >= limit)}"
            for spread in spreads
        ]
        rows.append((one["policy"], str(one["leaf_blocks"]), "default" if one["ghosts"] else "none", *cells))
    head = ("POLICY", "BLOCKS A LEAF", "GHOSTS", "EVICT 1: US, P50 / P99", "EVICT 16: US A BLOCK")
    parts = [columns(head, rows)]
    rows = [
        (
            one["policy"],
            f"{one['select_victims_us']['median']:.1f} / {one['select_victims_us']['p99']:.1f}"
            + "!" * (one["select_victims_us"]["median"] >= SELECT_LIMIT_US),
        )
        for one in selections
    ]
    parts.append(columns(("POLICY", "SELECT_VICTIMS: US, P50 / P99"), rows))
    return "\n\n".join(parts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--policy", action="append", help="only this one; may be repeated")
    parser.add_argument("--leaf-blocks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ghosts", choices=["default", "none"], nargs="+", default=["default", "none"])
    output_flags(parser, "eviction-cost")
    options = parser.parse_args()
    busy = foreign_cores()
    wanted = {name: made for name, made in policies().items() if not options.policy or name in options.policy}
    evictions = [
        cost(modules, name, options.leaves, leaf_blocks, ghosts=ghosts == "default")
        for name, modules in wanted.items()
        for leaf_blocks in options.leaf_blocks
        for ghosts in options.ghosts
    ]
    selections = [select_cost(modules, name) for name, modules in wanted.items()]
    publish(
        "eviction_cost",
        as_text(evictions, selections),
        options,
        foreign_cores=busy,
        leaves=options.leaves,
        limits_us={"lru": LRU_LIMIT_US, "others": LIMIT_US, "select_victims": SELECT_LIMIT_US},
        evictions=evictions,
        selections=selections,
    )


if __name__ == "__main__":
    main()
