"""What the decision log knows of each sequence, and what it costs to know it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import pytest

from sagellm.core import (
    InvalidInputError,
    OutOfBlocksError,
    Randomness,
    Runtime,
    ScheduleIR,
    SchedulerPassProtocol,
    UnknownRequestError,
    VirtualClock,
)
from sagellm.core.runtime import MemoryFiles
from sagellm.engines import AsyncLLMEngine, SamplingParams
from sagellm.engines.engine_core import decision_log, explanation
from sagellm.engines.engine_core.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = list(range(10, 60))
STEP_NS = 1000


@dataclass(frozen=True)
class Rewrite(SchedulerPassProtocol):
    """Does what a test asks for."""

    change: Callable[[ScheduleIR], ScheduleIR]

    @property
    def name(self) -> str:
        return "rewrite"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        return self.change(ir)


@pytest.fixture
def make(make_engine):
    """Make an engine on a clock of its own, without passes, in which each step takes a microsecond."""

    def build(**settings: Any) -> Any:
        clock = VirtualClock()
        runtime = Runtime(clock=clock, randomness=Randomness(0), files=MemoryFiles())
        defaults = {"scheduler_passes": "share=none,chunk=none", "block_size": 8}
        engine = make_engine(runtime=runtime, **(defaults | settings))
        engine.clock = clock
        return engine

    return build


def step(engine, number=1):
    for _ in range(number):
        engine.step()
        engine.clock.advance_ns(STEP_NS)


def run(engine):
    while engine.has_unfinished_requests():
        step(engine)


def told(engine, request_id=None):
    """The explanation of a request's only sequence, and its events by kind."""
    (sequence,) = engine.explain(request_id).sequences
    kinds: dict[str, list[Any]] = {}
    for event in sequence.events:
        kinds.setdefault(event.kind, []).append(event)
    return sequence, kinds


def waits(kinds):
    return [(wait.reason, wait.first_step, wait.last_step) for wait in kinds["waited"]]


def test_a_request_that_is_served_at_once_waits_for_nothing(make):
    engine = make()
    engine.add_request(PROMPT, GREEDY)
    run(engine)
    sequence, kinds = told(engine)
    assert [event.kind for event in sequence.events] == ["queued", "admitted", "computed", "finished"]
    (admitted,), (computed,), (finished,) = kinds["admitted"], kinds["computed"], kinds["finished"]
    assert (admitted.num_tokens, admitted.num_cached_tokens, admitted.place) == (50, 0, 1)
    assert (computed.num_tokens, computed.num_steps, computed.capped_by) == (50, 1, None)
    assert (finished.reason, finished.num_output_tokens) == ("length", 4)
    assert finished.at_ns >= 3 * STEP_NS
    assert sequence.waited_ns == {}


def test_waits_follow_each_other_without_gaps_and_add_up(make, monkeypatch):
    monkeypatch.setattr(explanation, "MAX_WAITS", 1000)
    engine = make(num_blocks=24, max_num_batched_tokens=32, max_num_seqs=3, enable_prefix_caching=False)
    ids = [engine.add_request(PROMPT, LONG, priority=number % 2) for number in range(6)]
    run(engine)
    reasons = set()
    for request_id in ids:
        sequence, kinds = told(engine, request_id)
        reasons |= sequence.waited_ns.keys()
        waited = sum(
            admitted.at_ns - queued.at_ns
            for queued, admitted in zip(kinds["queued"], kinds["admitted"], strict=True)
        )
        assert sum(sequence.waited_ns.values()) == waited
        end_ns = 0
        for event in sequence.events:
            if event.kind == "waited":
                assert event.at_ns == end_ns
                end_ns += event.duration_ns
            else:
                end_ns = event.at_ns
    assert {"seats", "tokens", "blocks", "preemption"} <= reasons


def test_each_budget_is_named_with_its_steps(make):
    engine = make(max_num_batched_tokens=32, max_num_seqs=2)
    first, second, third = (engine.add_request(PROMPT, GREEDY) for _ in range(3))
    run(engine)
    assert "waited" not in told(engine, first)[1]
    assert waits(told(engine, second)[1]) == [("tokens", 0, 0)]
    kinds = told(engine, third)[1]
    (admitted,) = kinds["admitted"]
    assert waits(kinds) == [("tokens", 0, 0), ("seats", 1, admitted.step - 1)]
    assert kinds["waited"][1].duration_ns == (admitted.step - 1) * STEP_NS


def test_a_thousand_who_wait_for_a_seat_share_one_range(make):
    engine = make(max_num_seqs=1)
    for _ in range(1000):
        engine.add_request([5, 6, 7], LONG)
    step(engine, 30)
    log = engine.client.core.scheduler.log
    assert [cause.reason for change in log.changes for cause in change.causes] == ["seats"]
    assert waits(told(engine)[1]) == [("seats", 0, 29)]
    assert engine.explain().sequences[0].state == "waiting"
    assert engine.explain().prefix is None


def test_a_victim_is_told_for_whom_and_what_it_cost(make):
    engine = make(num_blocks=16, max_num_seqs=2, enable_prefix_caching=False)
    first, second = (engine.add_request(PROMPT, LONG) for _ in range(2))
    run(engine)
    winner, _ = told(engine, first)
    victim, kinds = told(engine, second)
    (preempted,) = kinds["preempted"]
    assert (preempted.preempted_for, preempted.made_by, preempted.way) == (
        winner.sequence_id,
        "",
        "recompute",
    )
    assert preempted.num_computed_tokens == preempted.num_wasted_tokens == victim.num_wasted_tokens > 50
    assert winner.preempted_for_it == (victim.sequence_id,)
    assert victim.num_preemptions == len(kinds["queued"]) - 1 == 1


def test_what_the_cache_still_has_of_a_victim_is_not_wasted(make):
    engine = make(num_blocks=128, max_num_seqs=2)
    scheduler = engine.client.core.scheduler
    change = {"at": 6}
    scheduler._ir.add_optimization_pass(
        Rewrite(lambda ir: ir.preempt([0], "swap") if ir.step == change["at"] else ir)
    )
    engine.add_request(PROMPT, LONG)
    run(engine)
    sequence, kinds = told(engine)
    (preempted,) = kinds["preempted"]
    assert (preempted.preempted_for, preempted.made_by, preempted.way) == (None, "rewrite", "swap")
    again = kinds["admitted"][1]
    assert again.num_cached_tokens > 0
    assert sequence.num_wasted_tokens == preempted.num_computed_tokens - again.num_cached_tokens


def test_parts_of_a_prompt_name_the_budget_that_ended_them(make):
    engine = make(max_num_batched_tokens=20)
    engine.add_request(PROMPT, GREEDY)
    run(engine)
    capped, last = told(engine)[1]["computed"]
    assert (capped.capped_by, capped.num_steps, capped.num_tokens, capped.made_by) == ("tokens", 2, 40, "")
    assert (last.capped_by, last.num_tokens) == (None, 10)


@pytest.mark.parametrize(
    ("change", "capped_by", "limits"),
    [
        (lambda ir: ir.lower(max_num_batched_tokens=20 + ir.step), "tokens", (20, 21)),
        (lambda ir: ir.cap(20, pending=range(len(ir.pending)), running=range(len(ir.running))), "cap", 20),
    ],
)
def test_a_pass_that_cuts_a_prompt_is_named_with_its_values(make, change, capped_by, limits):
    engine = make()
    engine.client.core.scheduler._ir.add_optimization_pass(Rewrite(change))
    engine.add_request(PROMPT, GREEDY)
    run(engine)
    capped = told(engine)[1]["computed"][0]
    assert (capped.capped_by, capped.made_by, capped.num_steps) == (capped_by, "rewrite", 2)
    assert (capped.least, capped.most) == (limits if isinstance(limits, tuple) else (limits, limits))


def test_a_cap_on_another_request_is_not_blamed(make):
    def cap_the_second(ir):
        return ir.cap(20, pending=[row for row, each in enumerate(ir.pending) if each.request_id[0] == "b"])

    engine = make(max_num_batched_tokens=20)
    engine.client.core.scheduler._ir.add_optimization_pass(Rewrite(cap_the_second))
    engine.add_request(PROMPT, GREEDY, request_id="a")
    engine.add_request(PROMPT, GREEDY, request_id="b")
    run(engine)
    capped = told(engine, "a")[1]["computed"][0]
    assert (capped.capped_by, capped.made_by, capped.num_tokens) == ("tokens", "", 40)


def test_positions_to_score_end_parts_too(make):
    engine = make(max_num_batched_tokens=2048, block_size=16)
    engine.add_request(list(range(10, 310)), SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    run(engine)
    assert [part.capped_by for part in told(engine)[1]["computed"]] == ["scored", None]


def test_whom_a_pass_defers_waits_for_it_and_nobody_else_does(make):
    def hold(ir: ScheduleIR) -> ScheduleIR:
        rows = [row for row in range(len(ir.pending)) if ir.pending[row].priority < 0 and ir.step < 7]
        return ir.defer(rows, "quota is used up")

    engine = make(max_num_seqs=1)
    engine.client.core.scheduler._ir.add_optimization_pass(Rewrite(hold))
    held = engine.add_request([5, 6], GREEDY, priority=-1)
    free = [engine.add_request([5, 6, each], GREEDY) for each in (7, 8)]
    run(engine)
    sequence, kinds = told(engine, held)
    assert waits(kinds)[0] == ("pass", 0, 6)
    assert (kinds["waited"][0].made_by, kinds["waited"][0].detail) == ("rewrite", "quota is used up")
    assert sequence.waited_ns["pass rewrite: quota is used up"] == 7 * STEP_NS
    assert told(engine, free[0])[0].waited_ns == {}
    assert told(engine, free[1])[0].waited_ns.keys() == {"seats"}


def test_a_pass_that_moves_a_request_forward_is_named_and_so_are_the_overtaken(make):
    engine = make(max_num_seqs=1)
    engine.client.core.scheduler._ir.add_optimization_pass(
        Rewrite(lambda ir: ir.order_pending(range(len(ir.pending))[::-1]) if ir.can_admit else ir)
    )
    first, second, third = (engine.add_request([5, 6, each], GREEDY) for each in (7, 8, 9))
    run(engine)
    sequence, kinds = told(engine, third)
    (placed,), (admitted,) = kinds["placed"], kinds["admitted"]
    assert (placed.step, placed.places) == (0, {"rewrite": 1})
    assert (admitted.place, admitted.places) == (3, {"rewrite": 1})
    late = told(engine, first)[0]
    names = [told(engine, each)[0].sequence_id for each in (second, third)]
    assert (late.num_overtaken, sorted(late.overtaken_by)) == (2, sorted(names))
    assert sequence.num_overtaken == 0


def test_an_aborted_request_that_waits_says_for_what(make):
    engine = make(max_num_seqs=1)
    engine.add_request(PROMPT, LONG)
    waiting = engine.add_request(PROMPT, LONG)
    step(engine, 5)
    engine.abort_request(waiting)
    sequence, kinds = told(engine, waiting)
    assert (sequence.state, kinds["finished"][0].reason) == ("finished", "abort")
    assert waits(kinds) == [("seats", 0, 4)]
    assert sequence.waited_ns == {"seats": 5 * STEP_NS}


def test_each_continuation_of_a_request_is_told(make):
    engine = make()
    engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=2, ignore_eos=True))
    run(engine)
    assert len({each.sequence_id for each in engine.explain().sequences}) == 3


def test_the_cause_of_a_cache_miss_is_told(make):
    engine = make()
    for _ in range(2):
        engine.add_request(PROMPT, GREEDY)
        run(engine)
    found = engine.explain()
    assert found.prefix is not None
    assert (found.prefix["cause"], found.prefix["match_length"]) == ("none", 49)
    assert told(engine)[1]["admitted"][0].num_cached_tokens == 49


def test_an_unknown_id_is_refused_with_what_there_is(make):
    engine = make()
    with pytest.raises(UnknownRequestError, match="no request has arrived yet"):
        engine.explain()
    request_id = engine.add_request(PROMPT, GREEDY)
    with pytest.raises(UnknownRequestError, match=f"no request 'nobody' among the last 1; .*{request_id}"):
        engine.explain("nobody")
    with pytest.raises(InvalidInputError, match="must be a text"):
        engine.explain(["a"])
    assert engine.explain(request_id[:6]).request_id == request_id


def test_asking_between_steps_changes_nothing(make):
    engines = [make(max_num_batched_tokens=20, max_num_seqs=1) for _ in range(2)]
    for engine, is_asked in zip(engines, (True, False), strict=True):
        for number in range(3):
            engine.add_request(PROMPT, GREEDY, request_id=f"request-{number}")
        while engine.has_unfinished_requests():
            step(engine)
            if is_asked:
                engine.explain()
                engine.explain()
    one, other = ([engine.explain(f"request-{each}").sequences for each in range(3)] for engine in engines)
    assert one == other


def test_the_oldest_finished_ones_are_forgotten_first(make, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_FINISHED", 3)
    engine = make()
    ids = [engine.add_request(PROMPT, GREEDY) for _ in range(5)]
    run(engine)
    log = engine.client.core.scheduler.log
    assert [story.facts.request_id for story in log.stories()] == ids[2:]
    assert log._num_finished_events == sum(len(story.events) for story in log.stories())
    monkeypatch.setattr(decision_log, "MAX_FINISHED_EVENTS", 6)
    engine.add_request(PROMPT, GREEDY)
    run(engine)
    assert len(log.stories()) == 1


def test_no_prompt_is_kept_after_the_end(make):
    engine = make()
    engine.add_request(PROMPT, GREEDY)
    run(engine)
    (story,) = engine.client.core.scheduler.log.stories()
    held = [*story.facts[2:], *story.events]
    assert not any(isinstance(fact, Sized) and len(fact) >= len(PROMPT) for fact in held)
    assert not any(isinstance(each, Sequence) for each in gc.get_referents(story))


def test_many_events_of_one_sequence_keep_its_beginning_and_its_end(make, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_EVENTS", 6)
    engine = make()
    engine.client.core.scheduler._ir.add_optimization_pass(
        Rewrite(lambda ir: ir.preempt([0]) if ir.step % 3 == 2 and len(ir.running) else ir)
    )
    engine.add_request(PROMPT, LONG)
    run(engine)
    sequence, kinds = told(engine)
    assert (sequence.events[0].kind, sequence.events[-1].kind) == ("queued", "finished")
    assert sequence.num_forgotten_events > 0
    assert sequence.num_preemptions > len(kinds.get("preempted", ()))


def test_waits_that_are_forgotten_say_so(make, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_CHANGE_BYTES", 600)  # two changes
    engine = make(num_blocks=24, max_num_batched_tokens=32, max_num_seqs=3, enable_prefix_caching=False)
    ids = [engine.add_request(PROMPT, LONG) for _ in range(6)]
    run(engine)
    log = engine.client.core.scheduler.log
    assert len(log.changes) == 2
    assert any("forgotten" in told(engine, each)[0].waited_ns for each in ids)


def test_the_rows_that_passes_defer_count_against_the_bytes(make, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_CHANGE_BYTES", 20_000)
    engine = make()
    engine.client.core.scheduler._ir.add_optimization_pass(
        Rewrite(lambda ir: ir.defer(range(ir.step % 2, len(ir.pending)), "in turn") if ir.step < 20 else ir)
    )
    for _ in range(500):
        engine.add_request([5, 6], SamplingParams(temperature=0.0, max_tokens=1))
    step(engine, 20)
    log = engine.client.core.scheduler.log
    deferred = [cause.keys.nbytes for change in log.changes for cause in change.causes if cause.detail]
    assert log._change_bytes == 256 * len(log.changes) + sum(deferred)
    assert 0 < sum(deferred) <= 20_000


def test_admissions_that_fail_for_lack_of_blocks_are_waits_for_blocks(make, monkeypatch):
    engine = make()
    kv = engine.client.core.kv
    admit, fails = kv.admit, {"left": 3}

    def failing(sequence):
        if fails["left"]:
            fails["left"] -= 1
            raise OutOfBlocksError("none", needed=1, available=0)
        admit(sequence)

    monkeypatch.setattr(kv, "admit", failing)
    engine.add_request(PROMPT, GREEDY)
    run(engine)
    assert {reason for reason, _, _ in waits(told(engine)[1])} == {"blocks"}


def test_a_request_whose_kv_is_fetched_waits_for_the_fetch(make, monkeypatch):
    engine = make()
    kv = engine.client.core.kv
    answers = iter([True, True, True])
    monkeypatch.setattr(kv, "is_fetching", lambda _: next(answers, False))
    monkeypatch.setattr(type(kv), "num_fetches", property(lambda _: 1))
    engine.add_request(PROMPT, GREEDY)
    run(engine)
    assert waits(told(engine)[1]) == [("fetch", 0, 2)]
    assert told(engine)[0].waited_ns.keys() == {"fetch"}


def test_the_async_engine_explains_too(make_engine):
    async def ask():
        async with AsyncLLMEngine(engine=make_engine()) as engine:
            async for _ in engine.generate([5, 6, 7], GREEDY, request_id="asked"):
                pass
            return await engine.explain("asked")

    assert asyncio.run(ask()).sequences[0].state == "finished"
