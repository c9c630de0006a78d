"""Greedy tokens are the same wherever the KV of evicted prompts was kept meanwhile."""

from __future__ import annotations

import random

import pytest

from sagellm.core import Namespace
from sagellm.core.late_kv_tier import LateKVTier
from sagellm.engines import SamplingParams
from sagellm.testing.patience import PATIENCE_S, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_random = random.Random(3)
PROMPTS = [[_random.randrange(5, 200) for _ in range(60)] for _ in range(6)]


@pytest.fixture(scope="module")
def expected(make_engine):
    engine = make_engine(block_size=8, max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def run(engine, times=2, *, settles=True, **options):
    """Generate for all prompts; what a prompt evicts is in the tiers before the next one comes."""
    found, kv = [], engine.client.core.kv
    for prompt in PROMPTS * times:
        found += engine.generate(prompt, GREEDY, **options)
        if settles:
            wait_until(lambda: kv.poll() or not kv.offload._puts)
    return [output.outputs[0].token_ids for output in found], [output.num_cached_tokens for output in found]


def make(make_engine, tiers, **options):
    defaults = {"block_size": 8, "num_blocks": 20, "kv_tiers": tiers, "kv_fetch": "always"}
    return make_engine(**(defaults | options))


@pytest.mark.parametrize("where", ["host", "file", "host over file", "redis", "host over redis"])
def test_tokens_are_the_same_when_kv_comes_back_from_a_tier(
    make_engine, expected, all_blocks_are_back, tmp_path, request, where
):
    file = {"max_bytes": "64MiB", "folder": str(tmp_path)}
    redis = {"max_bytes": "64MiB", "timeout_s": PATIENCE_S}
    if "redis" in where:
        redis["url"] = request.getfixturevalue("redis_url")
        redis["prefix"] = where.replace(" ", "-")
    options = {"host": "64MiB", "file": file, "redis": redis}
    tiers = {name: options[name] for name in where.split(" over ")}
    if len(tiers) > 1:
        tiers["host"] = 40_000
    engine = make(make_engine, tiers)
    tokens, num_cached = run(engine)
    assert tokens == expected * 2
    metrics = engine.metrics().modules["kv_tier"]
    assert metrics.num_kept_blocks > 20
    assert num_cached[6:] == [56] * 6
    assert metrics.num_fetched_blocks >= 30
    assert metrics.num_lost_blocks == 0
    if len(tiers) > 1:
        assert metrics.tiers.num_demoted > 0
    assert all_blocks_are_back(engine)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_late_answers_cost_no_cached_block(make_engine, expected, all_blocks_are_back, max_num_seqs):
    engine = make(make_engine, {"host": "64MiB"}, max_num_seqs=max_num_seqs, num_blocks=24)
    offload = engine.client.core.kv.offload
    offload.tiers = LateKVTier(offload.tiers, random.Random(1))
    tokens, num_cached = run(engine)
    assert tokens == expected * 2
    assert num_cached[6:] == [56] * 6
    for _ in range(3):
        found = engine.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in found] == expected
    assert all_blocks_are_back(engine)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("first", ["none", "shortest"])
def test_fetches_for_those_that_wait_leave_the_first_its_blocks(
    make_engine, expected, all_blocks_are_back, first, seed
):
    engine = make(
        make_engine, {"host": "64MiB"}, num_blocks=26, max_num_seqs=4, scheduler_passes=f"order={first}"
    )
    core, chance = engine.client.core, random.Random(seed)
    core.kv.offload.tiers = LateKVTier(core.kv.offload.tiers, random.Random(seed))
    for turn in range(6):
        order = chance.sample(range(6), 6)
        for number in order:
            engine.add_request(PROMPTS[number], GREEDY, request_id=f"{turn}-{number}")
        for _ in range(1_000):
            core.kv.evict(chance.randint(1, 5))
            for output in engine.step():
                if output.finished:
                    number = int(output.request_id.partition("-")[2])
                    assert output.outputs[0].token_ids == expected[number]
            if not engine.has_unfinished_requests():
                break
        assert not engine.has_unfinished_requests()
    assert all_blocks_are_back(engine)


def test_failing_tiers_cost_time_and_no_token(make_engine, expected, all_blocks_are_back):
    engine = make(make_engine, {"host": "64MiB"})
    offload = engine.client.core.kv.offload
    offload.tiers = LateKVTier(offload.tiers, random.Random(2), failure_rate=0.1)
    for _ in range(3):
        tokens, _ = run(engine)
        assert tokens == expected * 2
    assert offload.metrics().num_lost_blocks > 0
    assert all_blocks_are_back(engine)


def test_several_requests_at_once_are_fetched_for(make_engine, expected):
    engine = make(make_engine, {"host": "64MiB"}, num_blocks=40, max_num_seqs=4)
    for _ in range(3):
        found = engine.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in found] == expected
    assert engine.metrics().modules["kv_tier"].num_fetched_blocks > 0


def test_no_tenant_gets_what_another_one_left_in_a_tier(make_engine, expected):
    engine = make(make_engine, {"host": "64MiB"})
    first, second = Namespace("a"), Namespace("b")
    tokens, _ = run(engine, 1, namespace=first)
    before = engine.metrics().modules["kv_tier"].num_fetched_blocks
    others, _ = run(engine, 1, namespace=second)
    assert engine.metrics().modules["kv_tier"].num_fetched_blocks == before
    again, num_cached = run(engine, 1, namespace=first)
    assert tokens == others == again == expected
    assert num_cached == [56] * 6


def test_damaged_files_cost_time_and_no_token(make_engine, expected, tmp_path):
    engine = make(make_engine, {"file": {"max_bytes": "64MiB", "folder": str(tmp_path), "name": "kept"}})
    run(engine, 1)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 997):
        data[place] ^= 0x10
    path.write_bytes(data)
    tokens, _ = run(engine, 1)
    assert tokens == expected
    metrics = engine.metrics().modules["kv_tier"]
    assert metrics.tiers.num_corrupt > 0
    assert metrics.num_lost_blocks > 0


def test_what_is_cheaper_to_compute_is_not_fetched(make_engine, expected):
    engine = make(make_engine, {"host": "64MiB"}, kv_fetch="cheaper")
    offload = engine.client.core.kv.offload
    offload.tiers.get_cost_ns = lambda keys: 10**12
    tokens, num_cached = run(engine)
    assert tokens == expected * 2
    assert max(num_cached[6:]) < 8
    metrics = engine.metrics().modules["kv_tier"]
    assert (metrics.num_fetched_blocks, metrics.num_computed_instead > 20) == (0, True)


def test_a_named_file_serves_the_next_engine_and_no_other_model(make_engine, expected, tmp_path):
    tiers = {"file": {"max_bytes": "64MiB", "folder": str(tmp_path), "name": "kept"}}
    run(make(make_engine, tiers), 1)
    engine = make(make_engine, tiers)
    tokens, _ = run(engine, 1)
    assert tokens == expected
    assert engine.metrics().modules["kv_tier"].num_fetched_blocks > 20


def test_fetched_kv_that_cannot_be_written_is_computed(
    make_engine, expected, all_blocks_are_back, monkeypatch
):
    for is_late in (False, True):
        engine = make(make_engine, {"host": "64MiB"})
        offload = engine.client.core.kv.offload
        if is_late:
            offload.tiers = LateKVTier(offload.tiers, random.Random(1))
        run(engine, 1)

        def fails(*_):
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(offload._memory.access, "write_blocks", fails)
            assert run(engine, 1)[0] == expected
        assert offload.metrics().num_lost_blocks > 0
        assert all_blocks_are_back(engine)
        assert run(engine, 1)[0] == expected


def test_a_fetch_makes_room_in_a_cache_that_is_smaller_than_the_pool(make_engine, expected):
    engine = make(make_engine, {"host": "64MiB"}, num_blocks=64, prefix_cache_max_blocks=16)
    tokens, num_cached = run(engine)
    assert tokens == expected * 2
    assert num_cached[6:] == [56] * 6


def test_buffers_are_bounded_and_what_a_slow_tier_cannot_take_is_not_kept(make_engine, expected, monkeypatch):
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.offload._CHUNK_BYTES", 20_000)
    monkeypatch.setattr("sagellm.kvmgr.kv_pool.offload._MAX_PUT_BYTES", 20_000)
    engine = make(make_engine, {"host": "64MiB"})
    offload = engine.client.core.kv.offload
    poll, offload.tiers.poll = offload.tiers.poll, list
    assert run(engine, 1, settles=False)[0] == expected
    metrics = offload.metrics()
    assert metrics.num_kept_blocks * offload._memory.block_bytes < 60_000
    assert metrics.num_not_kept_blocks > 10
    offload.tiers.poll = poll
    assert run(engine)[0] == expected * 2
    assert len(offload._buffers) <= 2 * offload._chunk
