"""What one tenant cannot do to another, whatever priorities, prompts and numbers of requests it sends."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core import StepCost, Tenant, TokenIds
from sagellm.core.ids import RequestId
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, SchedulePlan, ScheduleRequest
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.fair_share import FairSharePass

FLOOD, OTHER, BOSS = Tenant("flood"), Tenant("other"), Tenant("boss", is_trusted=True)


def prompt(name: str, num_prompt: int, tenant: Tenant, **values: Any) -> ScheduleRequest:
    values = {"max_tokens": 100, "tenant": tenant, **values}
    return ScheduleRequest(request_id=RequestId(name), token_ids=TokenIds(bytes(4 * num_prompt)), **values)


def decode(name: str, tenant: Tenant, *, num_tokens: int = 33, **values: Any) -> ScheduleRequest:
    counts = {
        "num_tokens": num_tokens,
        "num_computed_tokens": num_tokens - 1,
        "num_blocks": -(-num_tokens // 16),
    }
    return prompt(name, 8, tenant, **{**counts, **values})


def scheduler(**options: Any) -> BaseSchedulerIR:
    made = BaseSchedulerIR(**{"max_num_seqs": 4, **options})
    made.add_optimization_pass(FairSharePass())
    return made


def plan(
    made: BaseSchedulerIR,
    pending: list[ScheduleRequest],
    running: list[ScheduleRequest],
    available: int = 1000,
) -> SchedulePlan:
    """Plan a step; both lists are put in the engine's order first: priority, then arrival."""
    for each in (pending, running):
        each.sort(key=lambda one: (-one.priority, one.arrived_time))
    return made.schedule(pending_requests=pending, running_requests=running, available_memory=available)


def admitted(result: SchedulePlan) -> list[str]:
    return [result.pending[entry.row].request_id for entry in result.admitted]


def preempted(result: SchedulePlan) -> list[str]:
    return [each.request_id for each in result.preempted_requests]


def tokens_of(result: SchedulePlan) -> dict[str, int]:
    return {each.request_id: each.num_tokens for each in result.scheduled_requests}


@pytest.mark.parametrize("priority", [0, 1000, 2**31 - 1])
def test_no_priority_takes_anothers_turn(priority: int) -> None:
    floods = [prompt(f"f{number}", 8, FLOOD, priority=priority) for number in range(8)]
    result = plan(scheduler(), [*floods, prompt("o", 8, OTHER, priority=-5, arrived_time=9.0)], [])
    assert len(admitted(result)) == 4
    assert "o" in admitted(result)


def test_priorities_order_a_tenants_own() -> None:
    own = [prompt(f"f{number}", 8, FLOOD, priority=number) for number in range(4)]
    result = plan(
        scheduler(), [*own, *(prompt(f"o{number}", 8, OTHER, arrived_time=number) for number in range(4))], []
    )
    assert [name for name in admitted(result) if name[0] == "f"] == ["f3", "f2"]
    assert [name for name in admitted(result) if name[0] == "o"] == ["o0", "o1"]


def test_urgent_requests_of_a_trusted_tenant_go_before_all() -> None:
    pending = [prompt(f"o{number}", 8, OTHER, priority=50) for number in range(4)]
    bosses = [prompt(f"b{number}", 8, BOSS, priority=1) for number in range(3)]
    assert set(admitted(plan(scheduler(), [*pending, *bosses], []))) == {"b0", "b1", "b2", "o0"}


def test_seats_are_given_back_to_a_tenant_below_its_share() -> None:
    flood = [decode(f"f{number}", FLOOD, priority=1000, arrived_time=number) for number in range(4)]
    result = plan(scheduler(), [prompt("o", 8, OTHER)], flood)
    assert (preempted(result), admitted(result)) == (["f3"], ["o"])


def test_a_tenant_that_uses_its_share_takes_no_more_seats() -> None:
    running = [decode(f"f{number}", FLOOD) for number in range(2)] + [
        decode(f"o{number}", OTHER) for number in range(2)
    ]
    assert preempted(plan(scheduler(), [prompt("o9", 8, OTHER), prompt("f9", 8, FLOOD)], running)) == []


def test_seats_go_by_weight() -> None:
    heavy = Tenant("heavy", weight=3.0)
    flood = [decode(f"f{number}", FLOOD, arrived_time=number) for number in range(4)]
    result = plan(scheduler(), [prompt(f"h{number}", 8, heavy) for number in range(4)], flood)
    assert (preempted(result), admitted(result)) == (["f3", "f2", "f1"], ["h0", "h1", "h2"])


def test_a_seat_is_taken_only_for_a_tenant_that_gets_it() -> None:
    """One that was served more waits until the others have caught up, instead of preempting for them."""
    made = scheduler()
    flood = [decode(f"f{number}", FLOOD, arrived_time=number) for number in range(3)]
    assert admitted(plan(made, [prompt("o1", 500, OTHER)], flood)) == ["o1"]
    running = [*flood, decode("f3", FLOOD)]
    num_steps = 0
    while not preempted(result := plan(made, [prompt("o2", 8, OTHER), prompt("f9", 8, FLOOD)], running)):
        num_steps += 1
        assert num_steps < 200, "its turn comes"
    assert num_steps > 20
    assert admitted(result) == ["o2"]


def test_an_urgent_request_of_a_trusted_tenant_keeps_its_seat() -> None:
    bosses = [decode(f"b{number}", BOSS, priority=1) for number in range(4)]
    assert preempted(plan(scheduler(), [prompt("o", 8, OTHER)], bosses)) == []


@pytest.mark.parametrize("priority", [0, 1000])
def test_blocks_are_taken_from_the_tenant_that_holds_the_most(priority: int) -> None:
    flood = [
        decode(f"f{number}", FLOOD, num_tokens=49, num_blocks=3, priority=priority, arrived_time=number)
        for number in range(3)
    ]
    result = plan(scheduler(), [], [*flood, decode("o", OTHER, num_blocks=2, arrived_time=9.0)], 0)
    assert "o" not in preempted(result)
    assert tokens_of(result)["o"] == 1
    assert preempted(result) == ["f2"]


def test_a_running_prompt_leaves_the_step_to_a_tenant_served_less() -> None:
    made = scheduler(max_num_batched_tokens=100)
    long = prompt("f", 5000, FLOOD, priority=1000, num_computed_tokens=1000, num_blocks=313)
    tokens = tokens_of(plan(made, [prompt("o", 40, OTHER)], [long]))
    assert tokens == {"f": 60, "o": 40}


def test_a_running_prompt_leaves_tokens_of_a_step_cut_by_time() -> None:
    """The budget of a step that is cut after the turns are given is known from the last one."""
    made = scheduler(cost=lambda: StepCost(token_ns=1e6), step_target_ms=100.0)
    made.add_optimization_pass(ChunkedPrefillPass())
    flood = [decode("f0", FLOOD), prompt("f1", 5000, FLOOD, num_computed_tokens=1000, num_blocks=313)]
    for _ in range(4):
        plan(made, [], [*flood, decode("o0", OTHER)])
    tokens = tokens_of(plan(made, [prompt("o1", 60, OTHER)], [*flood, decode("o0", OTHER)]))
    assert tokens["o1"] == 60
    assert 1 <= tokens["f1"] <= 40


COST = StepCost(base_ns=1e6, token_ns=1e5, seq_ns=1e5)


def test_decodes_of_a_flood_take_as_long_as_the_prompt_of_one_that_sends_little() -> None:
    made = scheduler(max_num_seqs=100, cost=lambda: COST)
    flood = [decode(f"f{number}", FLOOD, priority=9) for number in range(99)]
    tokens = tokens_of(plan(made, [prompt("o", 39, OTHER)], flood))
    assert tokens.pop("o") == 39
    assert len(tokens) == 25, "1 ms, 39 tokens and a sequence: 5 ms; a decode: 0.2 ms"


def test_decodes_that_sat_out_are_first_the_next_time() -> None:
    made = scheduler(max_num_seqs=100, cost=lambda: COST)
    last = dict.fromkeys((f"f{number}" for number in range(99)), -1)
    for step in range(4):
        flood = [decode(name, FLOOD, last_scheduled_step=number) for name, number in last.items()]
        served = tokens_of(plan(made, [prompt(f"o{step}", 39, OTHER)], flood))
        last |= dict.fromkeys((name for name in served if name[0] == "f"), step)
    assert list(last.values()).count(-1) == 0


def test_nobody_sits_out_for_a_tenant_that_has_its_seats() -> None:
    made = scheduler(max_num_seqs=100, cost=lambda: COST)
    running = [decode(f"f{number}", FLOOD) for number in range(60)]
    running += [decode(f"o{number}", OTHER) for number in range(30)]
    assert len(tokens_of(plan(made, [prompt("o", 39, OTHER)], running))) == 91


def test_nobody_sits_out_for_a_request_that_lacks_blocks() -> None:
    made = scheduler(max_num_seqs=100, cost=lambda: StepCost(seq_ns=1e6))
    flood = [decode(f"f{number}", FLOOD) for number in range(99)]
    for available, num_served in ((2, 99), (5000, 2)):
        result = plan(made, [prompt("o", 5000, OTHER)], flood, available=available)
        assert len(tokens_of(result)) == num_served


def test_somebody_always_advances() -> None:
    made = scheduler(max_num_seqs=100, cost=lambda: StepCost(seq_ns=1e3, kv_token_ns=1e9))
    flood = [decode(f"f{number}", FLOOD) for number in range(99)]
    assert len(tokens_of(plan(made, [prompt("o", 1, OTHER)], flood))) == 2


def test_few_decodes_do_not_sit_out() -> None:
    made = scheduler(max_num_seqs=100, cost=lambda: COST)
    flood = [decode(f"f{number}", FLOOD) for number in range(20)]
    assert len(tokens_of(plan(made, [prompt("o", 39, OTHER)], flood))) == 21


def test_of_two_long_prompts_neither_waits_for_the_end_of_the_other() -> None:
    made = scheduler(max_num_batched_tokens=100)
    done = {"f": 0, "o": 0}
    for _ in range(40):
        running = [
            prompt(name, 5000, tenant, num_computed_tokens=done[name], num_blocks=313, priority=priority)
            for name, tenant, priority in (("f", FLOOD, 1000), ("o", OTHER, 0))
        ]
        for name, num_tokens in tokens_of(plan(made, [], running)).items():
            done[name] += num_tokens
    assert done["f"] + done["o"] >= 39 * 100, "nothing is left over"
    assert abs(done["f"] - done["o"]) <= 200
