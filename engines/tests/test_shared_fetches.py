"""A fetch that is under way is waited for by others that want its blocks."""

from __future__ import annotations

import random

import pytest

from sagellm.core.protocols.kv_tier import TierResult
from sagellm.engines import SamplingParams
from sagellm.testing.patience import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_random = random.Random(14)
SHORT = [_random.randrange(5, 200) for _ in range(60)]  # 7 full blocks
LONG = [*SHORT, *(_random.randrange(5, 200) for _ in range(40))]  # 12
PROMPTS = {"short": SHORT, "long": LONG}


@pytest.fixture(scope="module")
def expected(make_engine):
    engine = make_engine(block_size=8, enable_prefix_caching=False)
    return {name: tokens_of(engine.generate(prompt, GREEDY)[0]) for name, prompt in PROMPTS.items()}


@pytest.fixture(params=["host", "file"])
def engine(make_engine, tmp_path, request):
    """An engine whose prompts are all in its tier and nowhere else."""
    tiers = {"host": "64MiB", "file": {"max_bytes": "64MiB", "folder": str(tmp_path)}}
    engine = make_engine(
        block_size=8,
        num_blocks=60,
        kv_tiers={request.param: tiers[request.param]},
        kv_fetch="always",
        scheduler_passes="order=none",  # what arrives first is fetched first, however long it is
    )
    engine.generate(LONG, GREEDY)
    core = engine.client.core
    core.kv.evict(60)
    while core.kv.offload._puts:
        core.kv.poll()
    return engine


class Held:
    """Holds back what the tiers of an engine answer, from now until `release`."""

    def __init__(self, engine):
        self.tiers = engine.client.core.kv.offload.tiers
        self._poll, self.tiers.poll = self.tiers.poll, list

    def release(self, outcome=None):
        def poll():
            results = self._poll()
            if outcome is None:
                return results
            return [TierResult(each.ticket, (outcome,) * len(each.outcomes)) for each in results]

        self.tiers.poll = poll


def tokens_of(output):
    return output.outputs[0].token_ids


def begin(engine, *names):
    """Add requests and let them wait for what is held back."""
    for name in names:
        engine.add_request(PROMPTS[name.partition("-")[0]], GREEDY, request_id=name)
    for _ in range(3):
        assert engine.step() == []


def finish(engine):
    found = {}
    while engine.has_unfinished_requests():
        found.update((output.request_id, output) for output in engine.step() if output.finished)
    return found


def metrics_of(engine):
    return engine.metrics().modules["kv_tier"]


def check(engine, found, expected, all_blocks_are_back):
    for name, output in found.items():
        assert tokens_of(output) == expected[name.partition("-")[0]]
    assert all_blocks_are_back(engine)


def test_of_several_that_want_the_same_blocks_one_fetches(engine, expected, all_blocks_are_back):
    held = Held(engine)
    begin(engine, "short-1", "short-2", "short-3")
    assert engine.client.core.kv.num_fetches == 1
    held.release()
    found = finish(engine)
    assert [output.num_cached_tokens for output in found.values()] == [56] * 3
    metrics = metrics_of(engine)
    assert (metrics.num_fetches, metrics.num_fetched_blocks, metrics.tiers.num_gets) == (1, 7, 7)
    check(engine, found, expected, all_blocks_are_back)


def test_who_has_waited_fetches_what_is_behind(engine, expected, all_blocks_are_back):
    held = Held(engine)
    begin(engine, "short-1", "long-2")
    held.release()
    found = finish(engine)
    assert {name: output.num_cached_tokens for name, output in found.items()} == {"short-1": 56, "long-2": 96}
    metrics = metrics_of(engine)
    assert (metrics.num_fetches, metrics.num_fetched_blocks, metrics.tiers.num_gets) == (2, 12, 12)
    check(engine, found, expected, all_blocks_are_back)


def test_a_longer_fetch_serves_a_shorter_prompt(engine, expected, all_blocks_are_back):
    held = Held(engine)
    begin(engine, "long-1", "short-2")
    held.release()
    found = finish(engine)
    assert (metrics_of(engine).num_fetches, metrics_of(engine).tiers.num_gets) == (1, 12)
    assert found["short-2"].num_cached_tokens == 59  # its last block begins as the next of the other one
    check(engine, found, expected, all_blocks_are_back)


def test_the_fetch_of_an_aborted_request_serves_those_that_wait(engine, expected, all_blocks_are_back):
    held = Held(engine)
    begin(engine, "short-1", "short-2")
    engine.abort_request("short-1")
    assert engine.step() == []
    held.release()
    found = finish(engine)
    assert found["short-2"].num_cached_tokens == 56
    assert (metrics_of(engine).num_fetches, metrics_of(engine).tiers.num_gets) == (1, 7)
    check(engine, found, expected, all_blocks_are_back)


def test_a_fetch_knows_where_the_blocks_before_it_went(engine, expected, all_blocks_are_back):
    core, other = engine.client.core, list(range(10, 35))
    engine.generate(LONG[:25], GREEDY)  # three blocks are on the device again
    before = core.kv.cache.match_prefix(LONG[:24]).block_ids
    held = Held(engine)
    begin(engine, "long")
    free = [block for block in range(60) if block not in core.kv._pool.block_info]
    moves = list(zip(before, free, strict=False))
    core.steps.copy_blocks(moves)
    core.kv.move_blocks(moves)
    engine.add_request(other, GREEDY)
    while not any(output.finished for output in engine.step()):
        pass
    assert set(before) <= set(core.kv.cache.match_prefix(other).block_ids)  # for other tokens now
    held.release()
    found = finish(engine)
    assert found["long"].num_cached_tokens == 96
    check(engine, found, expected, all_blocks_are_back)


@pytest.mark.parametrize("outcome", ["failed", "missing", "corrupt"])
def test_when_a_fetch_fails_who_waited_computes_at_once(engine, expected, all_blocks_are_back, outcome):
    held = Held(engine)
    begin(engine, "short-1", "long-2")
    held.release(outcome)
    scheduler = engine.client.core.scheduler
    while not scheduler.num_running:
        engine.step()
    assert scheduler.num_running == 2  # both since this step
    found = finish(engine)
    assert metrics_of(engine).num_fetches == 1
    assert metrics_of(engine).num_lost_blocks == 7
    check(engine, found, expected, all_blocks_are_back)


def test_nothing_is_left_of_waiters_that_are_aborted(engine):
    held = Held(engine)
    begin(engine, "short-1", "short-2")
    engine.abort_request("short-1")
    engine.abort_request("short-2")
    held.release()
    kv = engine.client.core.kv
    wait_until(lambda: kv.poll() or not kv.num_fetches)  # a file is read by a thread
    assert not kv._awaited


def test_a_fetch_for_nobody_ends_while_the_engine_is_idle(engine):
    core, held = engine.client.core, Held(engine)
    begin(engine, "short")
    engine.abort_request("short")
    assert not engine.has_unfinished_requests()
    assert core.kv.available_blocks < core.kv.total_blocks
    held.release()

    def is_over():
        core.use_idle_time()
        return not core.kv.num_fetches

    wait_until(is_over)
    assert core.kv.available_blocks == core.kv.total_blocks
