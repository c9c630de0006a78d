"""A preempted request's KV is copied to the tiers if a pass says so, and what passes are told of lengths."""

from __future__ import annotations

import random

import pytest

from sagellm.core import Namespace
from sagellm.engines import SamplingParams
from sagellm.engines.engine_core.sequence import RequestStatus

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
_random = random.Random(3)
PROMPTS = [[_random.randrange(5, 200) for _ in range(60)] for _ in range(6)]


@pytest.fixture(scope="module")
def expected(make_engine):
    engine = make_engine(block_size=8, max_num_seqs=1, enable_prefix_caching=False)
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def make(make_engine, mode, **options):
    passes = f"preempt=memory-aware{{mode={mode}}}"
    defaults = {"block_size": 8, "num_blocks": 30, "kv_tiers": {"host": "64MiB"}, "kv_fetch": "always"}
    return make_engine(scheduler_passes=passes, **(defaults | options))


def until_preempted(engine, **options):
    """Step until a request is preempted, and return it."""
    scheduler = engine.client.core.scheduler
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, GREEDY, request_id=str(number), **options)
    for _ in range(500):
        engine.step()
        for sequence_id in scheduler.sequence_ids:
            if scheduler[sequence_id].num_preemptions:
                return scheduler[sequence_id]
    raise AssertionError("nobody was preempted")


def test_swap_copies_kv_to_the_tiers_at_preemption(make_engine, expected, all_blocks_are_back):
    engine = make(make_engine, "swap")
    core = engine.client.core
    offered = []
    keep = core.kv.offload.keep

    def note(evicted):
        offered.append(evicted)
        keep(evicted)

    core.kv.offload.keep = note  # what the cache evicts does not come through here
    victim = until_preempted(engine)
    assert victim.status is RequestStatus.SWAPPED
    (evicted,) = offered
    tokens = victim.token_ids()
    assert [token for header in evicted.headers for token in header.token_ids] == list(
        tokens[: 8 * len(evicted.block_ids)]
    )
    assert len(evicted.block_ids) >= len(tokens) // 8 - 1
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each.outputs[0].token_ids for each in engine.step() if each.finished}
    assert all(outputs[name] == expected[int(name)] for name in outputs)
    assert victim.status.is_finished
    assert all_blocks_are_back(engine)


def test_what_is_swapped_out_stays_in_its_namespace(make_engine):
    engine, owner = make(make_engine, "swap"), Namespace("a", "s")
    victim = until_preempted(engine, namespace=owner)
    offload, tokens = engine.client.core.kv.offload, victim.token_ids()
    assert len(offload.find(tokens, owner, 0)) >= len(tokens) // 8 - 1
    for other in (Namespace(), Namespace("a"), Namespace("b", "s")):
        assert offload.find(tokens, other, 0) == []


@pytest.mark.parametrize(
    ("mode", "options"),
    [("recompute", {}), ("auto", {}), ("swap", {"kv_tiers": {}}), ("swap", {"enable_prefix_caching": False})],
    ids=["recompute", "auto with a cost of almost nothing", "without tiers", "without a cache"],
)
def test_tokens_are_the_same_in_every_mode(make_engine, expected, all_blocks_are_back, mode, options):
    engine = make(make_engine, mode, **options)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert engine.metrics().num_preemptions > 0
    assert all_blocks_are_back(engine)


@pytest.mark.parametrize(("mode", "tiers"), [("recompute", {"host": "64MiB"}), ("swap", {})])
def test_without_swap_or_tiers_a_preempted_request_just_waits(make_engine, mode, tiers):
    victim = until_preempted(make(make_engine, mode, kv_tiers=tiers))
    assert victim.status is RequestStatus.WAITING


def test_a_swapped_request_can_be_aborted(make_engine, all_blocks_are_back):
    engine = make(make_engine, "swap")
    victim = until_preempted(engine)
    assert victim.status is RequestStatus.SWAPPED
    engine.abort_request(victim.request.request_id)
    assert victim.status is RequestStatus.FINISHED_ABORTED
    while engine.has_unfinished_requests():
        engine.step()
    assert all_blocks_are_back(engine)


def test_passes_are_told_what_is_left_of_a_predicted_output(make_engine):
    engine = make_engine(block_size=8, num_blocks=128)
    engine.add_request(PROMPTS[0], GREEDY, request_id="a")
    scheduler = engine.client.core.scheduler
    (sequence_id,) = scheduler.sequence_ids
    scheduler[sequence_id].predicted_tokens = 10.0
    scheduler._waiting.remove(scheduler[sequence_id])
    scheduler._waiting.add(scheduler[sequence_id])
    waiting = scheduler._waiting.rows()
    assert (waiting.predicted_remaining_tokens[0], waiting[0].predicted_remaining_tokens) == (10, 10)
    engine.step()
    left = []
    for _ in range(12):
        rows = scheduler._running_rows()
        assert rows.predicted_remaining_tokens[0] == rows[0].predicted_remaining_tokens
        left.append(rows[0].predicted_remaining_tokens)
        engine.step()
    assert left[:9] == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert left[-1] == GREEDY.max_tokens - 12  # asked once more, as it is longer: nothing is known


def test_a_finished_status_is_known_by_its_name() -> None:
    finished = {status for status in RequestStatus if status.is_finished}
    assert finished == set(RequestStatus) - {
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
        RequestStatus.SWAPPED,
    }
