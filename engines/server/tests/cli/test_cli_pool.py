"""`pool stats|compact`: the KV pool of an engine that runs, over its socket."""

from __future__ import annotations

import threading

import pytest

from sagellm.core import EngineError
from sagellm.engines import SamplingParams
from sagellm.testing.patience import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPTS = [[n, n + 1, 7] * 9 for n in range(5, 11)]


@pytest.fixture
def engine(make_engine):
    """Make an engine whose pool has gaps: every other request has gone."""
    engine = make_engine(num_blocks=100, block_size=8, enable_prefix_caching=False)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, GREEDY, request_id=str(index))
    engine.step()
    for index in (0, 2, 4):
        engine.abort_request(str(index))
    return engine


def test_an_idle_pool_becomes_one_run(engine, run_engine, sage):
    before = engine.metrics().modules["kv_pool"]
    run_engine(engine, steps=False)
    stats = sage("llm", "pool", "stats", "--json").json
    assert stats["largest_free_run"] == before.largest_free_run < stats["num_free_blocks"]
    assert stats["num_misplaced_blocks"] == before.num_misplaced_blocks > 0
    result = sage("llm", "pool", "compact", "--json").json
    assert result["num_moved_blocks"] == before.num_misplaced_blocks
    assert result["external_fragmentation_before"] == before.external_fragmentation > 0
    assert (result["external_fragmentation_after"], result["num_misplaced_blocks"]) == (0, 0)
    assert result["largest_free_run_after"] == result["num_free_blocks"] == before.num_free_blocks
    assert 0 < result["num_steps"] <= result["num_moved_blocks"]
    assert 0 < result["moving_s"] < result["duration_s"]
    shown = sage("llm", "pool", "stats").out
    assert "misplaced blocks        0" in shown
    assert f"moved blocks            {before.num_misplaced_blocks}" in shown
    again = sage("llm", "pool", "compact")
    assert again.out.splitlines()[0].startswith("moved 0 blocks in 0 steps")
    assert "external fragmentation 0.0% before, 0.0% now" in again.out


def test_requests_go_on_and_get_the_same_tokens_while_blocks_move(make_engine, engine, run_engine, sage):
    alone = make_engine(num_blocks=100, block_size=8, enable_prefix_caching=False)
    expected = [alone.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    core = engine.client.core
    step, finished, is_compacting = core.step, {}, threading.Event()

    def collect():
        if not is_compacting.wait(0.001):
            return []
        outputs = step()
        for output in outputs:
            finished.setdefault(output.sequence_id, []).extend(output.token_ids)
        return outputs

    first = {
        sequence.sequence_id: sequence.output_token_ids().tolist()
        for sequence in core.scheduler._sequences.values()
    }
    moves = core.kv.move_blocks

    def note(pairs):
        moves(pairs)
        is_compacting.set()

    core.kv.move_blocks = note
    core.step = collect
    run_engine(engine)
    result = sage("llm", "pool", "compact", "--json").json
    is_compacting.set()
    tokens = [expected[index] for index in (1, 3, 5)]
    num_left = sum(map(len, tokens)) - sum(map(len, first.values()))
    wait_until(lambda: sum(map(len, finished.values())) == num_left)
    assert result["num_moved_blocks"] > 0
    assert [first[name] + finished[name] for name in sorted(first)] == tokens


def test_a_pool_that_moves_nothing_says_so(engine, run_engine, sage, monkeypatch):
    def refuse(max_blocks):
        raise EngineError("Fixed cannot move blocks; name another pool in kv.pool")

    monkeypatch.setattr(engine.client.core.kv, "plan_moves", refuse)
    run_engine(engine, steps=False)
    result = sage("llm", "pool", "compact")
    assert (result.code, "cannot move blocks; name another pool in kv.pool" in result.err) == (1, True)
