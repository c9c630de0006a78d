"""The intermediate representation as text, and what passes may and may not do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sagellm.core import EngineError, PluginRegistry, TokenIds
from sagellm.core.ids import RequestId
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR, ScheduleIR, ScheduleRequest, SchedulerPassProtocol

GOLDEN = """\
schedule available=7 tokens=64 seats=4 block=16
  running urgent tokens=33 computed=32 hit=0 priority=2
  running old tokens=33 computed=32 hit=0 priority=0
  running new tokens=33 computed=32 hit=0 priority=0
  pending short tokens=3 computed=0 hit=0 priority=0
  pending long tokens=40 computed=0 hit=16 priority=1"""


@dataclass(frozen=True)
class Rewrite(SchedulerPassProtocol):
    """Does what a test asks for."""

    change: Callable[[ScheduleIR], Any]
    title: str = "rewrite"

    @property
    def name(self) -> str:
        return self.title

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        result: ScheduleIR = self.change(ir)
        return result


def request(name: str, num_tokens: int, **values: Any) -> ScheduleRequest:
    return ScheduleRequest(RequestId(name), TokenIds(bytes(4 * num_tokens)), 8, **values)


def running(name: str, **values: Any) -> ScheduleRequest:
    return request(name, 33, num_computed_tokens=32, num_blocks=2, **values)


def state() -> dict[str, Any]:
    return {
        "running_requests": [
            running("new", arrived_time=5.0),
            running("old", arrived_time=1.0),
            running("urgent", arrived_time=9.0, priority=2),
        ],
        "pending_requests": [request("short", 3), request("long", 40, priority=1, prefix_cache_hit=16)],
        "available_memory": 7,
    }


def scheduler(*changes: Callable[[ScheduleIR], Any]) -> BaseSchedulerIR:
    made = BaseSchedulerIR(max_num_batched_tokens=64, max_num_seqs=4)
    for number, change in enumerate(changes):
        made.add_optimization_pass(Rewrite(change, f"number {number}"))
    return made


def ids(plan_part: Any) -> list[str]:
    return [entry.request_id for entry in plan_part]


def test_a_pass_sees_running_in_the_order_of_preemption_and_pending_as_given() -> None:
    texts: list[str] = []

    def look(ir: ScheduleIR) -> ScheduleIR:
        texts.append(ir.to_text())
        return ir

    scheduler(look).schedule(**state())
    assert texts == [GOLDEN]


def test_passes_run_in_the_order_they_were_added() -> None:
    seen: list[list[str]] = []

    def swap(ir: ScheduleIR) -> ScheduleIR:
        seen.append(ids(ir.pending))
        return ir.with_pending(ir.pending[::-1])

    plan = scheduler(swap, swap, swap).schedule(**state())
    assert seen == [["short", "long"], ["long", "short"], ["short", "long"]]
    assert ids(plan.scheduled_requests)[-1:] == ["long"]


def test_a_pass_decides_the_order_of_admission() -> None:
    plan = scheduler(lambda ir: ir.with_pending(ir.pending[::-1])).schedule(**state())
    assert (ids(plan.scheduled_requests), plan.deferred_reason) == (["new", "old", "urgent", "long"], "seats")


def test_a_pass_decides_who_is_preempted() -> None:
    given = state() | {"available_memory": 0}
    assert ids(scheduler().schedule(**given).preempted_requests) == ["new"]
    reversed_order = scheduler(lambda ir: replace(ir, running=ir.running[::-1]))
    assert ids(reversed_order.schedule(**given).preempted_requests) == ["urgent"]


def test_a_pass_may_lower_the_limits_of_a_step() -> None:
    plan = scheduler(lambda ir: replace(ir, max_num_batched_tokens=3)).schedule(**state())
    assert (plan.num_tokens, plan.deferred_reason) == (3, "tokens")
    plan = scheduler(lambda ir: replace(ir, max_num_seqs=3)).schedule(**state())
    assert plan.deferred_reason == "seats"


@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "max_num_seqs", "available_memory"])
def test_a_pass_that_raises_a_limit_is_named(limit: str) -> None:
    with pytest.raises(EngineError, match=f"'number 0' set {limit} to 1000; a pass may only lower it"):
        scheduler(lambda ir: replace(ir, **{limit: 1000})).schedule(**state())


def test_a_pass_that_changes_the_block_size_is_named() -> None:
    with pytest.raises(EngineError, match="'number 0' set block_size to 8; it stays 16"):
        scheduler(lambda ir: replace(ir, block_size=8)).schedule(**state())


def test_a_pass_that_loses_a_request_is_named_with_the_request() -> None:
    with pytest.raises(
        EngineError, match=r"'number 1' must keep .* pending requests: it lost 'long', added none"
    ):
        scheduler(lambda ir: ir, lambda ir: ir.with_pending(ir.pending[:1])).schedule(**state())


def test_a_pass_that_moves_a_request_is_named() -> None:
    def move(ir: ScheduleIR) -> ScheduleIR:
        return replace(ir, pending=ir.pending[1:], running=(*ir.running, ir.pending[0]))

    with pytest.raises(EngineError, match="lost 'short'"):
        scheduler(move).schedule(**state())


def test_a_pass_that_returns_something_else_is_named() -> None:
    with pytest.raises(EngineError, match="'number 0' returned NoneType, not a ScheduleIR"):
        scheduler(lambda ir: None).schedule(**state())


def test_a_pass_that_raises_is_named_and_the_cause_is_chained() -> None:
    with pytest.raises(EngineError, match="'number 0' failed: ZeroDivisionError") as caught:
        scheduler(lambda ir: 1 // 0).schedule(**state())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_scheduler_is_found_by_its_name() -> None:
    assert PluginRegistry.load().resolve("scheduler", "base") is BaseSchedulerIR
