"""Live blocks move between two steps, and greedy tokens stay the same."""

from __future__ import annotations

import random

import pytest

from sagellm.core import EngineError, KVAllocatorProtocol, RequestId, SequenceId
from sagellm.core.late_kv_tier import LateKVTier
from sagellm.engines import SamplingParams
from sagellm.engines.engine_core.compaction import Compactor

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
_random = random.Random(5)
SYSTEM = [_random.randrange(5, 200) for _ in range(21)]
PROMPTS = [[*SYSTEM[: 7 * (n % 4)], *(_random.randrange(5, 200) for _ in range(9 + 7 * n))] for n in range(8)]


@pytest.fixture(scope="module")
def expected(make_engine):
    engine = make_engine(block_size=8, max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


class Compacting:
    """Evicts and moves blocks before every step of an engine; the integrity is checked after each."""

    def __init__(self, engine, chance=1.0):
        core = engine.client.core
        self.num_moved = 0
        self._random = random.Random(1)
        self._step, self._kv, self._chance = core.step, core.kv, chance
        self.compactor = Compactor(
            core.kv, core.steps.copy_blocks, core.parts.runtime.clock, core.has_unfinished
        )
        core.step = self.step

    def step(self):
        if self._random.random() < self._chance:
            self._kv.evict(self._random.randrange(3))  # leaves a gap somewhere
            self.num_moved += self.compactor.advance()
            self._kv.check_integrity()
        return self._step()


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def run(engine, *, most=8):
    """Have requests come and go one by one, so that there are always gaps; `most` of them at once."""
    waiting = list(range(len(PROMPTS)))
    random.Random(2).shuffle(waiting)
    found = {}
    while waiting or engine.has_unfinished_requests():
        metrics = engine.metrics()
        if waiting and metrics.num_running + metrics.num_waiting < most:
            index = waiting.pop()
            engine.add_request(PROMPTS[index], GREEDY, request_id=str(index))
        for _ in range(3):
            for output in engine.step():
                if output.finished:
                    found[int(output.request_id)] = output.outputs[0].token_ids
    return [found[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {},
        {"num_blocks": 30, "max_num_seqs": 6},  # so few that sequences are preempted
        {"num_blocks": 30, "enable_prefix_caching": False},
        {"num_blocks": 60, "kv_tiers": {"host": "64MiB"}, "kv_fetch": "always"},
        {"max_num_batched_tokens": 16},
        {"attention_backend": "naive"},
        {"kv_allocator": "buddy"},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
def test_tokens_are_the_same_when_blocks_move_at_every_step(
    make_engine, expected, all_blocks_are_back, settings
):
    engine = make_engine(**({"block_size": 8, "num_blocks": 60} | settings))
    compacting = Compacting(engine)
    for _ in range(3):
        assert run(engine, most=3 if "kv_tiers" in settings else 8) == expected
    assert compacting.num_moved > 20
    metrics = engine.metrics()
    assert metrics.modules["kv_pool"].num_moved_blocks == compacting.num_moved
    if settings.get("num_blocks") == 30:
        assert metrics.num_preemptions > 0
    assert all_blocks_are_back(engine)


def test_blocks_that_hits_copy_may_have_moved(make_engine, expected):
    engine = make_engine(block_size=8, num_blocks=80)
    compacting = Compacting(engine, chance=0.5)
    for turn in range(4):
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
        engine.client.core.kv.evict(10 + turn)
    cache = engine.metrics().modules["prefix_cache"]
    assert cache.num_partial_hit_tokens > 0
    assert compacting.num_moved > 10


@pytest.mark.parametrize("failure_rate", [0.0, 0.1])
def test_fetches_under_way_find_their_blocks_where_these_went(
    make_engine, expected, all_blocks_are_back, failure_rate
):
    engine = make_engine(
        block_size=8, num_blocks=30, max_num_seqs=2, kv_tiers={"host": "64MiB"}, kv_fetch="always"
    )
    kv = engine.client.core.kv
    kv.offload.tiers = LateKVTier(kv.offload.tiers, random.Random(1), failure_rate=failure_rate)
    moved_for_fetches = 0
    move = kv.move_blocks

    def count(moves):
        nonlocal moved_for_fetches
        fetched = {block for each in kv._fetches for block in each.fetch.block_ids}
        moved_for_fetches += len(fetched.intersection(source for source, _ in moves))
        move(moves)

    kv.move_blocks = count
    Compacting(engine)
    for _ in range(4):
        assert run(engine, most=2) == expected
    assert moved_for_fetches > 0
    assert all_blocks_are_back(engine)


def test_a_compact_pool_has_one_free_run_and_cached_prefixes_still_match(make_engine, expected):
    engine = make_engine(block_size=8, num_blocks=100)
    compacting = Compacting(engine, chance=0.0)
    engine.generate(PROMPTS, GREEDY)
    engine.client.core.kv.evict(30)
    before = engine.metrics().modules["kv_pool"]
    assert before.external_fragmentation > 0
    num_misplaced = before.num_misplaced_blocks
    moved = []
    while num_moved := compacting.compactor.advance():
        moved.append(num_moved)
    assert sum(moved) == num_misplaced
    after = engine.metrics().modules["kv_pool"]
    assert (after.external_fragmentation, after.num_misplaced_blocks) == (0, 0)
    assert after.largest_free_run == after.num_free_blocks == before.num_free_blocks
    hits = engine.metrics().modules["prefix_cache"].num_hit_tokens
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.metrics().modules["prefix_cache"].num_hit_tokens > hits


def fragmented(make_engine, **settings):
    """Make an engine in which two requests run behind a gap."""
    engine = make_engine(block_size=8, num_blocks=60, enable_prefix_caching=False, **settings)
    for name in ("gone", "0", "1"):
        engine.add_request(PROMPTS[0] if name == "gone" else PROMPTS[int(name)], GREEDY, request_id=name)
    for _ in range(3):
        engine.step()
    engine.abort_request("gone")
    return engine


def finish(engine):
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return [found[RequestId(name)].outputs[0].token_ids for name in ("0", "1")]


@pytest.mark.parametrize("where", ["copy", "claim", "free", "cache", "cache move"])
def test_what_fails_in_the_middle_costs_neither_a_block_nor_a_request(
    make_engine, expected, all_blocks_are_back, monkeypatch, where
):
    engine = fragmented(make_engine)
    core = engine.client.core
    compactor = Compacting(engine, chance=0.0).compactor
    target, name = {
        "copy": (core.runner.backend, "copy_blocks"),
        "claim": (core.kv._pool._allocator, "claim"),
        "free": (core.kv._pool._allocator, "free"),
        "cache": (core.kv.cache, "move_blocks"),
        "cache move": (core.kv._pool, "move"),
    }[where]
    original = getattr(target, name)

    def fail(*arguments):
        monkeypatch.setattr(target, name, original)
        raise EngineError("not now")

    before = engine.metrics().modules["kv_pool"]
    monkeypatch.setattr(target, name, fail)
    with pytest.raises(EngineError, match="not now"):
        compactor.advance()
    core.kv.check_integrity()
    assert engine.metrics().modules["kv_pool"].num_free_blocks == before.num_free_blocks
    assert compactor.advance() > 0
    core.kv.check_integrity()
    assert finish(engine) == expected[:2]
    assert all_blocks_are_back(engine)


def test_nothing_moves_while_a_copy_waits_for_its_step(make_engine):
    engine = fragmented(make_engine)
    core = engine.client.core
    assert core.kv.plan_moves(1)
    core.kv._copies.append((0, 1))
    assert core.kv.plan_moves(1) == []


def test_copies_for_requests_that_ended_with_a_failed_step_are_forgotten(make_engine, monkeypatch, expected):
    engine = fragmented(make_engine)
    kv = engine.client.core.kv

    def fail():
        kv._copies.append((0, 1))
        raise EngineError("no plan")

    monkeypatch.setattr(engine.client.core.scheduler, "schedule", fail)
    engine.step()
    monkeypatch.undo()
    assert list(kv.take_copies()) == []
    assert tokens_of(engine.generate(PROMPTS[:2], GREEDY)) == expected[:2]


def test_a_slice_takes_no_more_than_its_share_of_a_step():
    class Clock:
        now = 10**12

        def now_ns(self):
            return self.now

    class KV:
        def __init__(self):
            self.sizes = []

        def plan_moves(self, max_blocks):
            self.sizes.append(max_blocks)
            return [(SequenceId("from"), SequenceId("to"))] * max_blocks

        def move_blocks(self, moves):
            clock.now += 100_000 * len(moves)  # 0.1 ms a block

    clock, kv, busy = Clock(), KV(), True
    compactor = Compactor(kv, lambda moves: None, clock, lambda: busy)
    for _ in range(6):
        compactor.advance()
        clock.now += 16_000_000  # a step
    assert kv.sizes == [4, 8, 16, 20, 20, 20]
    clock.now += 10**9
    compactor.advance()
    assert kv.sizes[-1] == 4
    busy = False
    for _ in range(6):
        compactor.advance()
    assert kv.sizes[-6:] == [8, 16, 32, 64, 100, 100]


def test_any_allocator_can_be_compacted(make_engine, expected, monkeypatch):
    engine = fragmented(make_engine)
    allocator = engine.client.core.kv._pool._allocator
    for name in ("claim", "occupancy"):
        method = getattr(KVAllocatorProtocol, name)
        monkeypatch.setattr(allocator, name, method.__get__(allocator), raising=True)
    # the free list's own metrics ask for its occupancy
    monkeypatch.setattr(allocator, "metrics", type(allocator)(60).metrics)
    compacting = Compacting(engine)
    assert finish(engine) == expected[:2]
    assert compacting.num_moved > 0
