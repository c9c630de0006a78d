"""Two thousand requests with random aborts: no block is lost and memory stops growing."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from sagellm.engines import SamplingParams


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmRSS")


def churn(engine, num_requests: int, rng: random.Random, heads: Sequence[list[int]] = ([],)) -> None:
    live: list[str] = []
    started = 0
    while started < num_requests or live:
        while started < num_requests and len(live) < 16:
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=rng.randint(1, 24),
                ignore_eos=True,
                n=rng.choice([1, 1, 2]),
            )
            head = rng.choice(heads)
            prompt = head[: rng.randint(0, len(head))] + [
                rng.randrange(3, 300) for _ in range(rng.randint(1, 60))
            ]
            live.append(engine.add_request(prompt, params))
            started += 1
        for output in engine.step():
            if output.finished:
                live.remove(output.request_id)
        if live and rng.random() < 0.2:
            engine.abort_request(live.pop(rng.randrange(len(live))))


@pytest.mark.full
def test_random_aborts_lose_no_block_and_memory_is_flat(make_engine, all_blocks_are_back):
    engine = make_engine(num_blocks=32, max_num_batched_tokens=64)
    rng = random.Random(5)
    churn(engine, 1000, rng)
    assert all_blocks_are_back(engine)
    gc.collect()
    before = resident_mib()
    churn(engine, 1000, rng)
    gc.collect()
    growth = resident_mib() - before
    assert all_blocks_are_back(engine)
    assert engine.metrics().num_preemptions > 0
    assert growth < 16, f"memory grew by {growth:.1f} MiB"


def test_a_few_random_aborts_lose_no_block(make_engine, all_blocks_are_back):
    engine = make_engine(num_blocks=48, max_num_batched_tokens=64)
    churn(engine, 60, random.Random(6))
    assert all_blocks_are_back(engine)
    assert engine.client.core.parts.predictor.num_live_sequences == 0


@pytest.mark.no_cover
def test_what_has_ended_is_freed_without_the_collector(make_engine):
    # a core in a process of its own makes full collections rare: a circle of references would last for hours
    rng = random.Random(7)
    heads = [[rng.randrange(3, 300) for _ in range(200)] for _ in range(6)]
    engine = make_engine(num_blocks=64, block_size=8, max_num_batched_tokens=64)
    churn(engine, 60, rng, heads)
    gc.collect()
    gc.disable()
    try:
        churn(engine, 240, rng, heads)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert found == {}
