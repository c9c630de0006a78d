"""The base scheduler: its rules, and the kit's contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from sagellm.core import ConfigError, EngineError, ScheduleIR, TokenIds, VirtualClock
from sagellm.core.ids import RequestId
from sagellm.core.protocols.scheduler_ir import NullSchedulerPass
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, PrefixHit, SchedulePlan, ScheduleRequest
from sagellm.testing.schedule_simulation import ScheduleSimulation
from sagellm.testing.scheduler import SchedulerContract


def prompt(name: str, num_tokens: int, **values: float) -> ScheduleRequest:
    return ScheduleRequest(RequestId(name), TokenIds(bytes(4 * num_tokens)), 64, **values)  # type: ignore[arg-type]


def decode(name: str, num_computed: int = 31, *, num_blocks: int = 2, **values: float) -> ScheduleRequest:
    return replace(
        prompt(name, num_computed, **values),
        num_tokens=num_computed + 1,
        num_computed_tokens=num_computed,
        num_blocks=num_blocks,
    )


def plan(
    scheduler: BaseSchedulerIR,
    *,
    pending: list[ScheduleRequest] | None = None,
    running: list[ScheduleRequest] | None = None,
    available: int = 100,
) -> SchedulePlan:
    return scheduler.schedule(
        pending_requests=pending or [], running_requests=running or [], available_memory=available
    )


def entries(result: SchedulePlan) -> list[tuple[str, int, int]]:
    return [(str(e.request_id), e.num_tokens, e.num_new_blocks) for e in result.scheduled_requests]


def ids(requests: object) -> list[str]:
    return [str(request.request_id) for request in requests]  # type: ignore[attr-defined]


def test_a_decode_takes_a_block_only_when_its_last_one_is_full() -> None:
    running = [decode("inside", 31), decode("at the border", 32)]
    assert entries(plan(BaseSchedulerIR(), running=running)) == [("inside", 1, 0), ("at the border", 1, 1)]


def test_a_request_gets_all_the_blocks_that_it_lacks() -> None:
    few, idle = decode("few", 40, num_blocks=0), replace(decode("idle", 40, num_blocks=0), num_tokens=40)
    chunk = replace(prompt("chunk", 16), num_blocks=1)
    for running in ([few, idle], [few, idle, chunk]):
        result = plan(BaseSchedulerIR(), running=running, available=3)
        assert entries(result)[0] == ("few", 1, 3)
        assert "idle" not in ids(result.scheduled_requests)
        assert not result.preempted


def test_a_request_with_nothing_to_compute_is_left_out() -> None:
    waiting_for_its_token = replace(decode("a"), num_tokens=31)
    result = plan(BaseSchedulerIR(), running=[waiting_for_its_token, decode("b")])
    assert entries(result) == [("b", 1, 0)]


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    scheduler = BaseSchedulerIR(max_num_batched_tokens=64)
    request = prompt("long", 100)
    first = plan(scheduler, pending=[request], running=[decode("a")])
    assert entries(first) == [("a", 1, 0), ("long", 63, 7)]
    request = replace(request, num_blocks=7, num_computed_tokens=63)
    assert entries(plan(scheduler, running=[decode("a"), request])) == [("a", 1, 0), ("long", 37, 0)]


def test_a_chunk_leaves_a_token_for_each_request_behind_it() -> None:
    long = prompt("long", 1000, num_blocks=63)
    result = plan(BaseSchedulerIR(max_num_batched_tokens=10), running=[long, decode("a"), decode("b")])
    assert entries(result) == [("long", 8, 0), ("a", 1, 0), ("b", 1, 0)]


def test_with_fewer_tokens_than_requests_the_longest_passed_over_comes_first() -> None:
    scheduler = BaseSchedulerIR(max_num_batched_tokens=2)
    running = [decode(name) for name in "abc"]
    turns = []
    for _ in range(4):
        result = plan(scheduler, running=running)
        turns.append("".join(name for name, _, _ in entries(result)))
        for row in result.rows.tolist():
            running[row] = replace(running[row], last_scheduled_step=result.step)
    assert turns == ["ab", "ca", "bc", "ab"]


def test_a_turn_goes_by_age_when_the_set_of_requests_changes() -> None:
    running = [decode("a", last_scheduled_step=5), decode("b", last_scheduled_step=2)]
    running.append(decode("c", last_scheduled_step=9))
    assert entries(plan(BaseSchedulerIR(max_num_batched_tokens=1), running=running)) == [("b", 1, 0)]


def test_the_latest_arrival_of_the_lowest_priority_gives_up_its_blocks() -> None:
    running = [
        decode("needs", 32, arrived_time=0),
        decode("urgent", arrived_time=9, priority=1),
        decode("early", arrived_time=1),
        decode("late", arrived_time=2, num_blocks=5),
    ]
    result = plan(BaseSchedulerIR(), running=running, available=0)
    assert ids(result.preempted_requests) == ["late"]
    assert list(result.preempted_for) == [0]
    assert entries(result) == [("needs", 1, 1), ("urgent", 1, 0), ("early", 1, 0)]


def test_who_has_nobody_behind_it_is_preempted_for_itself() -> None:
    running = [decode("early", arrived_time=1), decode("late", 32, arrived_time=2)]
    result = plan(BaseSchedulerIR(), running=running, available=0)
    assert (list(result.preempted), list(result.preempted_for)) == ([1], [1])


def test_several_victims_of_one_request_are_for_it_and_those_of_passes_for_nobody() -> None:
    @dataclass(frozen=True)
    class PreemptFirst(NullSchedulerPass):
        def run(self, ir: ScheduleIR) -> ScheduleIR:
            return ir.preempt([0])

    scheduler = BaseSchedulerIR()
    scheduler.add_optimization_pass(PreemptFirst())
    running = [
        decode("gone", num_blocks=2),
        prompt("long", 100),
        decode("b", num_blocks=3, arrived_time=1),
        decode("c", num_blocks=2, arrived_time=2),
    ]
    result = plan(scheduler, running=running, available=0)
    assert (list(result.preempted), list(result.preempted_for)) == ([0, 3, 2], [-1, 1, 1])


def test_passes_are_replaced_together_or_not_at_all() -> None:
    @dataclass(frozen=True)
    class Counting(NullSchedulerPass):
        number: int

        def start(self) -> list[int]:
            return []

        def run(self, ir: ScheduleIR) -> ScheduleIR:
            ir.state.append(ir.step)
            return ir

    scheduler, seen = BaseSchedulerIR(), []
    scheduler.watch(lambda name, before, after: seen.append((after.step, before.state[:])))
    scheduler.add_optimization_pass(Counting(1))
    plan(scheduler)
    scheduler.set_passes([Counting(2), Counting(1)])
    plan(scheduler)
    assert seen == [(0, [0]), (1, [1]), (1, [0, 1])]
    assert [each.num_runs for each in scheduler.metrics().passes] == [1, 2]
    with pytest.raises(ConfigError):
        scheduler.set_passes([Counting(1), object()])  # type: ignore[list-item]
    assert [each.num_runs for each in scheduler.metrics().passes] == [1, 2]
    scheduler.set_passes([])
    plan(scheduler)
    assert (scheduler.metrics().passes, len(seen)) == ([], 3)


def test_a_pass_that_fails_to_start_is_named() -> None:
    class Stuck(NullSchedulerPass):
        def start(self) -> None:
            raise SystemExit("no")

    for add in (BaseSchedulerIR().add_optimization_pass, lambda each: BaseSchedulerIR().set_passes([each])):
        with pytest.raises(EngineError, match="scheduler pass 'null' failed: SystemExit: no"):
            add(Stuck())


def test_on_a_tie_the_last_in_the_list_goes() -> None:
    running = [decode("needs", 32), decode("b"), decode("c")]
    assert ids(plan(BaseSchedulerIR(), running=running, available=0).preempted_requests) == ["c"]


def test_a_victim_that_had_its_turn_returns_tokens_and_new_blocks() -> None:
    late = decode("late", 32, arrived_time=5)
    long = prompt("long", 40)
    running = [late, long]
    result = plan(BaseSchedulerIR(max_num_batched_tokens=41), running=running, available=1)
    assert ids(result.preempted_requests) == ["late"]
    assert entries(result) == [("long", 40, 3)]


def test_nobody_preempts_a_higher_rank_but_goes_instead() -> None:
    running = [
        decode("urgent", priority=1),
        decode("early", arrived_time=1),
        decode("late", 32, arrived_time=2),
    ]
    result = plan(BaseSchedulerIR(), running=running, available=0)
    assert ids(result.preempted_requests) == ["late"]
    assert entries(result) == [("urgent", 1, 0), ("early", 1, 0)]


def test_one_shortage_can_cost_several_requests() -> None:
    prefill = prompt("prefill", 64, arrived_time=0)
    running = [
        prefill,
        decode("b", 15, num_blocks=1, arrived_time=1),
        decode("c", 15, num_blocks=1, arrived_time=2),
        decode("d", 15, num_blocks=1, arrived_time=3),
    ]
    result = plan(BaseSchedulerIR(), running=running, available=2)
    assert ids(result.preempted_requests) == ["d", "c"]
    assert entries(result) == [("prefill", 64, 4), ("b", 1, 0)]


def test_alone_and_larger_than_memory_is_preempted_for_the_engine_to_report() -> None:
    result = plan(BaseSchedulerIR(), running=[decode("alone", 32)], available=0)
    assert ids(result.preempted_requests) == ["alone"]
    assert entries(result) == []


def test_a_step_that_preempts_admits_nobody() -> None:
    result = plan(
        BaseSchedulerIR(), pending=[prompt("waits", 1)], running=[decode("a", 32), decode("b")], available=0
    )
    assert (result.num_admitted, result.num_deferred, result.deferred_reason) == (0, 1, "preemption")


def test_admission_reserves_the_blocks_of_all_tokens_less_the_hit() -> None:
    request = prompt("a", 100, prefix_cache_hit=32)
    assert entries(plan(BaseSchedulerIR(max_num_batched_tokens=8), pending=[request])) == [("a", 8, 5)]


def test_a_hit_of_everything_still_computes_one_token() -> None:
    request = prompt("a", 32, prefix_cache_hit=32)
    assert entries(plan(BaseSchedulerIR(), pending=[request], available=0)) == [("a", 1, 0)]


def test_what_the_engine_says_is_needed_counts() -> None:
    request = prompt("a", 100, prefix_cache_hit=32, kv_blocks_needed=7)
    assert entries(plan(BaseSchedulerIR(), pending=[request], available=7)) == [("a", 68, 7)]
    assert plan(BaseSchedulerIR(), pending=[request], available=6).deferred_reason == "blocks"


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    result = plan(BaseSchedulerIR(), pending=[prompt("large", 64), prompt("small", 1)], available=3)
    assert (entries(result), result.num_deferred, result.deferred_reason) == ([], 2, "blocks")


@pytest.mark.parametrize(
    ("options", "reason"), [({"max_num_seqs": 3}, "seats"), ({"max_num_batched_tokens": 9}, "tokens")]
)
def test_the_reason_names_what_ran_out(options: dict[str, int], reason: str) -> None:
    pending = [prompt(name, 4) for name in "abc"]
    result = plan(BaseSchedulerIR(**options), pending=pending, running=[decode("r")])
    assert (result.num_admitted, result.num_deferred, result.deferred_reason) == (2, 1, reason)


def test_the_probe_sees_only_requests_that_are_considered() -> None:
    seen: list[str] = []

    def probe(request: ScheduleRequest) -> PrefixHit:
        seen.append(request.request_id)
        return request.stated_hit(16)

    scheduler = BaseSchedulerIR(probe=probe)
    plan(scheduler, pending=[prompt("a", 16), prompt("b", 1600), prompt("c", 16)], available=50)
    assert seen == ["a", "b"]


def test_a_plan_has_the_number_of_its_step() -> None:
    scheduler = BaseSchedulerIR()
    assert [plan(scheduler).step for _ in range(3)] == [0, 1, 2]


def test_counts_and_time_come_from_what_was_handed_in() -> None:
    class TickingClock(VirtualClock):
        def now_ns(self) -> int:
            self.advance_ns(7)
            return super().now_ns()

    scheduler = BaseSchedulerIR(clock=TickingClock())
    plan(scheduler)
    plan(scheduler, pending=[prompt("b", 5)], running=[decode("a", 32), decode("c")], available=0)
    metrics = scheduler.metrics()
    assert (metrics.num_steps, metrics.num_idle_steps, metrics.num_scheduled_tokens) == (2, 1, 1)
    assert (metrics.num_preempted, metrics.num_admitted, metrics.last_schedule_ns) == (1, 0, 7)


@pytest.mark.parametrize("key", ["max_num_batched_tokens", "max_num_seqs", "block_size"])
def test_limits_below_one_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is 0; it must be at least 1"):
        BaseSchedulerIR(**{key: 0})


def test_the_name_of_a_pass_is_not_a_pass() -> None:
    with pytest.raises(ConfigError, match=r"resolve\('scheduler_pass', 'priority'\)"):
        BaseSchedulerIR().add_optimization_pass("priority")  # type: ignore[arg-type]


class TestBaseSchedulerIR(SchedulerContract):
    def make(self, **options: Any) -> BaseSchedulerIR:
        return BaseSchedulerIR(**options)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_every_request_ends_under_a_thousand_random_loads(part: int) -> None:
    for seed in range(100 + part, 1100, 10):
        ScheduleSimulation(BaseSchedulerIR, seed).run()


def test_the_random_loads_preempt_and_meet_failed_allocations() -> None:
    simulations = [ScheduleSimulation(BaseSchedulerIR, seed) for seed in range(100)]
    for simulation in simulations:
        simulation.run()
    assert sum(simulation.num_steps for simulation in simulations) > 10_000
    assert sum(simulation.num_preempted for simulation in simulations) > 100
    assert sum(simulation.num_dropped_plans for simulation in simulations) > 0


def test_the_log_says_what_a_step_may_have_which_passes_changed_and_who_was_preempted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "sagellm.kvmgr.scheduler_ir")
    scheduler = BaseSchedulerIR(64, 4, 16, step_target_ms=20)
    assert caplog.messages == [
        "a step has at most 64 tokens of at most 4 requests, in blocks of 16 tokens, and should take 20 ms"
    ]
    scheduler.set_passes([NullSchedulerPass()])
    scheduler.set_passes([NullSchedulerPass()])
    assert [message for message in caplog.messages if "change" in message] == [
        "scheduler passes change: 0 stay and keep their state, 1 are new, 0 are gone",
        "scheduler passes change: 1 stay and keep their state, 0 are new, 0 are gone",
    ]
    caplog.clear()
    plan(scheduler, running=[decode("a"), decode("b")])
    assert not caplog.messages, "a step without such an event is not logged"
    plan(scheduler, running=[decode("a", 32), decode("b", 32)], available=0)
    assert caplog.messages == ["step 1 preempts 1 requests"]
