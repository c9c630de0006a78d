"""Passes over several steps: what they remember, how much they ask; what a pipeline shows."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sagellm.core import (
    EngineError,
    PluginRegistry,
    PrefixHit,
    RequestRows,
    ScheduleIR,
    SchedulePlan,
    ScheduleRequest,
    SchedulerPassProtocol,
    StepCost,
    Tenant,
    TokenIds,
    VirtualClock,
)
from sagellm.core.ids import RequestId
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, passes
from sagellm.kvmgr.scheduler_ir.passes import (
    AdmissionLimitPass,
    ChunkedPrefillPass,
    FairSharePass,
    MemoryAwarePreemptionPass,
    PrefixCacheAwarePass,
    PriorityBasedPass,
    ShortestFirstPass,
)
from sagellm.kvmgr.scheduler_ir.passes.estimates import num_prompt_tokens_within
from sagellm.kvmgr.scheduler_ir.pipeline import PassPipeline
from sagellm.kvmgr.scheduler_ir.schedule_text import schedule_from_text, schedule_to_text
from sagellm.kvmgr.scheduler_ir.schedule_watchers import emit_ir, print_changed


def request(name: str, num_prompt_tokens: int = 16, **values: Any) -> ScheduleRequest:
    return ScheduleRequest(RequestId(name), TokenIds(bytes(4 * num_prompt_tokens)), 64, **values)


def decode(name: str, **values: Any) -> ScheduleRequest:
    return request(name, 32, num_tokens=33, num_computed_tokens=32, num_blocks=3, **values)


def ir_of(
    pending: list[ScheduleRequest], running: list[ScheduleRequest] | None = None, **values: Any
) -> ScheduleIR:
    given: dict[str, Any] = {
        "available_memory": 1000,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "block_size": 16,
    }
    rows = RequestRows.of(pending), RequestRows.of(running or [])
    return ScheduleIR(pending=rows[0], running=rows[1], **(given | values))


class Probed:
    """A probe that counts."""

    def __init__(self, hits: dict[str, int]) -> None:
        self.hits = hits
        self.asked: list[str] = []

    def __call__(self, row: ScheduleRequest) -> PrefixHit:
        self.asked.append(row.request_id)
        return PrefixHit(self.hits.get(row.request_id, 0), 1)


@pytest.mark.parametrize("made", [PrefixCacheAwarePass(max_probes=4), ShortestFirstPass(max_probes=4)])
def test_a_long_queue_is_asked_for_a_few_at_a_time_until_all_are_known(made: SchedulerPassProtocol) -> None:
    names = [f"r{number}" for number in range(10)]
    probe, state = Probed({"r9": 8}), made.start()
    ir = ir_of([request(name) for name in names], probe=probe, epoch=1, state=state)
    for num_asked in (4, 8, 10, 10):
        after = made.run(ir)
        assert len(probe.asked) == num_asked
    assert sorted(probe.asked) == sorted(names)
    assert after.admission[0] == 9


def test_answers_are_asked_for_again_when_the_epoch_changes_the_unknown_first_then_the_oldest() -> None:
    made, probe = PrefixCacheAwarePass(max_probes=2), Probed({})
    rows = [request(name) for name in "abcd"]
    ir = ir_of(rows, probe=probe, epoch=1, state=made.start())
    made.run(ir)
    made.run(replace(ir, epoch=2))
    assert probe.asked == ["a", "b", "c", "d"]
    made.run(replace(ir, epoch=3))
    assert sorted(probe.asked[4:]) == ["a", "b"]
    probe.hits = {"e": 16}
    after = made.run(replace(ir, epoch=4, pending=RequestRows.of([*rows[1:], request("e")])))
    assert set(probe.asked[6:]) == {"e", "c"}
    assert [after.pending[row].request_id for row in after.admission.tolist()] == ["e", "b", "c", "d"]


def test_an_answer_that_has_grown_old_is_replaced() -> None:
    made, probe = PrefixCacheAwarePass(), Probed({"b": 16})
    ir = ir_of([request("a"), request("b")], probe=probe, epoch=1, state=made.start())
    assert made.run(ir).admission.tolist() == [1, 0]
    probe.hits = {"a": 16}
    assert made.run(ir).admission.tolist() == [1, 0]
    assert made.run(replace(ir, epoch=2)).admission.tolist() == [0, 1]


def test_ten_thousand_waiting_requests_are_still_ordered_by_their_prefix() -> None:
    made = PrefixCacheAwarePass(max_probes=1000)
    names = [f"r{number}" for number in range(10_000)]
    probe = Probed({"r9999": 8})
    ir = ir_of([request(name) for name in names], probe=probe, epoch=1, state=made.start())
    for _ in range(10):
        after = made.run(ir)
    assert len(probe.asked) == 10_000
    assert after.admission[:2].tolist() == [9999, 0]


def test_a_chunk_grows_twice_as_large_as_the_largest_so_far_at_most() -> None:
    scheduler = BaseSchedulerIR(
        512, step_target_ms=1e6, cost=lambda: StepCost(token_ns=1), clock=VirtualClock()
    )
    scheduler.add_optimization_pass(ChunkedPrefillPass())
    long, sizes = request("long", 4000, num_blocks=250), []
    for _ in range(4):
        plan = scheduler.schedule(
            pending_requests=[], running_requests=[decode("a"), long], available_memory=99
        )
        sizes.append(plan.num_tokens.max())
        long = replace(long, num_computed_tokens=long.num_computed_tokens + sizes[-1])
    assert sizes == [64, 128, 256, 511]


@pytest.mark.parametrize(
    ("num_computed", "num_tokens"),
    [
        (
            400,
            283,
        ),  # what the target of 1 ms leaves: the decode takes 34 µs, the KV 1 µs a token, a chunk 2 µs
        (800, 100),  # 0.2 of it
        (1150, 58),  # up to 1.3 of it
        (2000, 25),  # 0.05 of it
    ],
)
def test_a_prompt_gets_its_share_beside_decodes_and_its_own_context(
    num_computed: int, num_tokens: int
) -> None:
    running = [decode("a"), request("long", 4000, num_computed_tokens=num_computed)]
    cost = StepCost(token_ns=1000, kv_token_ns=1000)
    assert num_prompt_tokens_within(ir_of([], running), cost, 1.0, 0.2) == num_tokens


def serve(scheduler: BaseSchedulerIR, waiting: list[ScheduleRequest], num_steps: int) -> Counter[str]:
    """Serve a backlog in two seats with endless blocks; return the tokens that each tenant got."""
    running: list[ScheduleRequest] = []
    served: Counter[str] = Counter()
    for _ in range(num_steps):
        plan = scheduler.schedule(pending_requests=waiting, running_requests=running, available_memory=10_000)
        for row, num_tokens, _ in plan.scheduled_requests:
            served[row.tenant.name] += num_tokens
            computed = replace(row, num_computed_tokens=row.num_computed_tokens + num_tokens)
            (waiting if row in waiting else running).remove(row)
            if computed.num_computed_tokens == computed.num_tokens:
                computed = replace(computed, num_tokens=computed.num_tokens + 1)
            if computed.num_tokens - len(row.token_ids) < 5:
                running.append(replace(computed, num_blocks=9))
        running = [
            row
            for row in running
            if row.request_id not in {each.request_id for each in plan.preempted_requests}
        ]
    return served


def backlog(*tenants: Tenant, num_tokens: int = 20) -> list[ScheduleRequest]:
    return [
        request(f"{tenant.name}-{number}", num_tokens, tenant=tenant)
        for number in range(400)
        for tenant in tenants
    ]


def fair_scheduler(**options: Any) -> BaseSchedulerIR:
    scheduler = BaseSchedulerIR(40, 2, clock=VirtualClock())
    scheduler.add_optimization_pass(FairSharePass(**options))
    return scheduler


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_with_a_backlog_are_served_by_weight(weight: float) -> None:
    served = serve(fair_scheduler(output_cost=1), backlog(Tenant("red"), Tenant("blue", weight)), 200)
    assert served["blue"] / served["red"] == pytest.approx(weight, rel=0.1)


def test_many_requests_do_not_get_a_tenant_more_than_its_share() -> None:
    red, blue = Tenant("red"), Tenant("blue")
    waiting = backlog(red, red, red, red, blue)
    waiting = [replace(row, request_id=f"{number}") for number, row in enumerate(waiting)]
    served = serve(fair_scheduler(output_cost=1), waiting, 200)
    assert served["blue"] / served["red"] == pytest.approx(1, rel=0.1)


def test_idling_saves_nothing_up() -> None:
    scheduler, red, blue = fair_scheduler(), Tenant("red"), Tenant("blue")
    waiting = backlog(red, num_tokens=10)
    waiting.append(request("first", 10, tenant=blue))
    serve(scheduler, waiting, 50)
    late = serve(scheduler, backlog(red, blue, num_tokens=10), 100)
    assert late["blue"] / late["red"] == pytest.approx(1, rel=0.15)


def test_a_request_that_was_preempted_before_is_spared_for_one_that_was_not() -> None:
    made = MemoryAwarePreemptionPass(mode="recompute")
    state = made.start()
    running = [decode("spared"), replace(decode("other"), num_computed_tokens=40, num_tokens=41)]
    ir = ir_of([], running, available_memory=0, state=state)
    assert made.run(ir).preemption.tolist() == [1, 0]
    nothing = ir.running.num_tokens[:0]
    plan = SchedulePlan(
        pending=ir.pending,
        running=ir.running,
        rows=nothing,
        num_tokens=nothing,
        num_new_blocks=nothing,
        preempted=[0],
    )
    made.observe(plan, state)
    assert made.run(ir).preemption.tolist() == [0, 1]


def test_a_plan_says_which_of_the_preempted_are_swapped() -> None:
    scheduler = BaseSchedulerIR(64, 8, cost=lambda: StepCost(token_ns=1e6), clock=VirtualClock())
    scheduler.add_optimization_pass(MemoryAwarePreemptionPass(min_swap_ms=50))
    large = request("large", 64, num_tokens=65, num_computed_tokens=64, num_blocks=5)
    running = [replace(large, request_id="larger", num_tokens=97, num_computed_tokens=96, num_blocks=6)]
    running += [large, request("small", 16, num_tokens=17, num_computed_tokens=16, num_blocks=1)]
    plan = scheduler.schedule(pending_requests=[], running_requests=running, available_memory=0)
    assert (list(plan.preempted), list(plan.swapped)) == ([2], [])
    plan = scheduler.schedule(pending_requests=[], running_requests=running[:2], available_memory=0)
    assert (list(plan.preempted), list(plan.swapped)) == ([1], [1])


def test_a_pipeline_counts_runs_decisions_and_time() -> None:
    clock = VirtualClock()

    class Slow(PriorityBasedPass):
        def run(self, ir: ScheduleIR) -> ScheduleIR:
            clock.advance_ns(700)
            return super().run(ir)

    pipeline = PassPipeline(clock, [Slow(), FairSharePass()])
    rows = [request("low"), request("high", priority=3)]
    for pending in (rows, rows[:1]):
        pipeline.run(ir_of(pending))
    first, second = pipeline.metrics()
    assert (first.name, first.num_runs, first.num_decisions, first.total_ns) == ("priority", 2, 1, 1400)
    assert (second.name, second.num_runs, second.num_decisions, second.total_ns) == ("fair-share", 2, 0, 0)
    assert len(pipeline) == 2


def test_watchers_see_each_pass_and_its_effect() -> None:
    printed, changed = io.StringIO(), io.StringIO()
    pipeline = PassPipeline(passes=[PriorityBasedPass(), FairSharePass()])
    pipeline.watch(emit_ir(printed))
    pipeline.watch(print_changed(changed))
    ir = pipeline.run(ir_of([request("low"), request("high", priority=3)], step=7))
    assert changed.getvalue() == "step 7: priority: order pending 1 0\n"
    first, second = printed.getvalue().split("// after ")[1:]
    assert (first.splitlines()[0], second.splitlines()[0]) == ("priority", "fair-share")
    assert schedule_to_text(schedule_from_text(second.partition("\n")[2])) == schedule_to_text(ir)


def test_a_pass_that_fails_to_observe_is_named() -> None:
    class Forgetful(FairSharePass):
        def observe(self, plan: SchedulePlan, state: Any) -> None:
            raise KeyError("gone")

    scheduler = BaseSchedulerIR()
    scheduler.add_optimization_pass(Forgetful())
    with pytest.raises(EngineError, match="scheduler pass 'fair-share' failed: KeyError"):
        scheduler.schedule(pending_requests=[request("a")], running_requests=[], available_memory=9)


def test_a_given_cache_is_asked_without_a_lock() -> None:
    class Cache:
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        def match_prefix(self, token_ids: TokenIds, namespace: object) -> Any:
            self.calls.append((len(token_ids), namespace))
            return type("Match", (), {"match_length": len(token_ids) - 10})()

        def __getattr__(self, name: str) -> Callable[..., None]:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_: pytest.fail(f"{name} was called")

    cache = Cache()
    made = PrefixCacheAwarePass(cache)  # type: ignore[arg-type]
    rows = [request("short", 20), request("long", 50)]
    assert made.run(ir_of(rows, state=made.start())).admission.tolist() == [1, 0]
    assert cache.calls == [(20, rows[0].namespace), (50, rows[1].namespace)]


def test_the_old_name_of_shortest_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"LifetimeAwarePass \(lifetime\) is ShortestFirstPass"):
        old = passes.LifetimeAwarePass(untrusted="max", starvation_s=5)
    assert isinstance(old, ShortestFirstPass)
    assert PluginRegistry.load().resolve("scheduler_pass", "lifetime") is passes.LifetimeAwarePass
    ir = ir_of([request("long", 90), request("short", 20)], state=old.start())
    assert old.run(ir).admission.tolist() == [1, 0]


def test_what_the_queue_takes_follows_the_rate_of_admission() -> None:
    """Prompts that take a second alone are admitted one in two seconds: three of them are six seconds."""
    made, cost = ShortestFirstPass(), StepCost(token_ns=1e7)
    state = made.start()
    for step in range(0, 400, 2):
        ir = ir_of([request(f"{step}{name}", 100) for name in "abc"], state=state, cost=cost, now=float(step))
        made.run(ir)
        plan = BaseSchedulerIR(max_num_batched_tokens=100, clock=VirtualClock()).schedule(
            pending_requests=[*ir.pending], running_requests=[], available_memory=100
        )
        assert plan.num_admitted == 1
        made.observe(plan, state)
    assert state.longest_s == pytest.approx(6.0, rel=0.1)


@pytest.mark.parametrize("order", [ShortestFirstPass(), PriorityBasedPass()])
def test_a_prompt_makes_no_way_for_those_whom_a_later_pass_defers(order):
    """One running prompt, and a hundred shorter and more urgent ones that its tenant's limit keeps out."""
    clock = VirtualClock()
    cost = StepCost(base_ns=1e7, token_ns=1e5)
    scheduler = BaseSchedulerIR(2048, 8, 16, clock=clock, cost=lambda: cost, step_target_ms=50)
    scheduler.set_passes([order, AdmissionLimitPass(max_seats=1)])
    waiting = [request(f"p{number}", 600, priority=1) for number in range(100)]
    num_computed, num_steps = 100, 0
    while num_computed < 4000:
        long = request("long", 4000, num_computed_tokens=num_computed, num_blocks=300)
        plan = scheduler.schedule(pending_requests=waiting, running_requests=[long], available_memory=1000)
        num_computed += plan.num_scheduled_tokens
        num_steps += 1
        clock.sleep_ns(50_000_000)
    assert num_steps == 2
