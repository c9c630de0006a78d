"""A schedule is printed as text and read back, whatever its requests are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sagellm.core import (
    InvalidInputError,
    Namespace,
    RequestRows,
    ScheduleIR,
    ScheduleRequest,
    StepCost,
    Tenant,
    TokenIds,
)
from sagellm.core.ids import RequestId
from sagellm.kvmgr.scheduler_ir.schedule_text import schedule_from_text, schedule_to_text
from sagellm.testing.schedule_states import random_ir

ODD = [
    "1",
    "-1",
    "1e5",
    "nan",
    "inf",
    "a b",
    'say "x"',
    "a=b",
    "a/b",
    "yes",
    "\\",
    "\n",
    "é",
    "",
    "running 0 a",
    "#",
]
names = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(0, 999_999)
times = st.integers(0, 99_999).map(lambda value: value / 8)


@st.composite
def requests(draw: st.DrawFn) -> ScheduleRequest:
    num_prompt_tokens = draw(st.integers(1, 60))
    return ScheduleRequest(
        request_id=RequestId(draw(names)),
        token_ids=TokenIds(bytes(4 * num_prompt_tokens)),
        max_tokens=draw(numbers),
        priority=draw(st.integers(-99, 99)),
        arrived_time=draw(times),
        prefix_cache_hit=draw(numbers),
        kv_blocks_needed=draw(st.none() | numbers),
        num_tokens=num_prompt_tokens + draw(st.integers(0, 9)),
        num_computed_tokens=draw(numbers),
        num_blocks=draw(numbers),
        last_scheduled_step=draw(st.integers(-1, 9999)),
        predicted_remaining_tokens=draw(st.none() | st.integers(0, 99).map(float)),
        confidence=draw(st.none() | st.sampled_from((0.0, 0.25, 1.0))),
        deadline=draw(st.none() | times),
        namespace=Namespace(draw(names), draw(names), draw(names)),
        tenant=Tenant(draw(names), draw(st.sampled_from((0.5, 1.0, 2.0))), draw(st.booleans())),
    )


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleIR:
    ir = ScheduleIR(
        pending=RequestRows.of(draw(st.lists(requests(), max_size=4))),
        running=RequestRows.of(draw(st.lists(requests(), max_size=4))),
        available_memory=draw(numbers),
        max_num_batched_tokens=draw(numbers),
        max_num_seqs=draw(numbers),
        block_size=16,
        step=draw(numbers),
        now=draw(times),
        cost=draw(st.none() | st.builds(StepCost, base_ns=numbers.map(float), pair_ns=st.just(0.5))),
        step_target_ms=draw(st.none() | st.sampled_from((0.5, 20.0))),
    )
    pending, running = range(len(ir.pending)), range(len(ir.running))
    ir = ir.order_pending(draw(st.permutations(pending))).order_running(draw(st.permutations(running)))
    ir = ir.cap(draw(st.integers(1, 99)), pending=pending, running=running).lower(max_num_seqs=0)
    ir = ir.yield_to_pending(draw(st.integers(0, 99)), running[1:])
    reason = draw(st.sampled_from(("later", "a = b", "its tenant's limit")))
    return ir.defer(pending[:1], reason).preempt(running[:1], "swap").swap(running[1:])


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_what_is_printed_can_be_read_back(ir: ScheduleIR) -> None:
    read = schedule_from_text(schedule_to_text(ir))
    assert schedule_to_text(read) == schedule_to_text(ir)
    assert [*read.pending] == [*ir.pending]
    assert [*read.running] == [*ir.running]
    assert (read.cost, read.step_target_ms, read.now) == (ir.cost, ir.step_target_ms, ir.now)
    assert (read.preempted, read.swapped, read.deferred) == (ir.preempted, ir.swapped, ir.deferred)
    assert read.caps("running").tolist() == ir.caps("running").tolist()


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_are_read_back(seed: int) -> None:
    ir = random_ir(seed)
    assert schedule_to_text(schedule_from_text(schedule_to_text(ir))) == schedule_to_text(ir)


HEAD = "step 3 at 1.500 s: available=7 tokens=64 seats=4 block=16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a schedule begins with 'step N at T s: …'"),
        ("hello", "not with ['hello']"),
        (f"{HEAD}\n  nonsense", "line 2 is neither a row nor a decision: '  nonsense'"),
        (f"{HEAD}\n  pending 1 a tokens=4", "the pending rows are numbered [1]; they must count from 0"),
        (f"{HEAD}\n  pending 0 a tokens=4 colour=red", "line 2 has 'colour'; a row has arrived, blocks,"),
        (f"{HEAD}\n  pending 0 a tokens=4 alone", "line 2 has 'alone', which is not of the form name=value"),
        (f"{HEAD} gpu_ns=5", "a step cost has no 'gpu_ns'"),
        (f"{HEAD} base_ns=fast", "line 1 has 'base_ns=fast'; the value must be a number"),
        (HEAD.removesuffix(" block=16"), "line 1 must have block=N with an integer N"),
        (HEAD.replace("1.500", "1.5.0"), "a schedule begins with 'step N at T s: …'"),
        (f"{HEAD}\n  pending 0 a hit=4", "line 2 must have tokens=N"),
        (f"{HEAD}\n  pending 0 a tokens=1.5", "line 2 must have tokens=N"),
        (f"{HEAD}\n  pending 0 a tokens=four", "line 2 has 'tokens=four'; the value must be a number"),
        (f"{HEAD}\n  cap running = all", "line 2 has cap running = all; the value must be an integer"),
        (f"{HEAD}\n  lower max_num_seqs", "line 2 has lower max_num_seqs = None; the value must"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        schedule_from_text(text)
    assert message in str(caught.value)


def test_a_row_is_as_long_as_its_text() -> None:
    ir = schedule_from_text(f"{HEAD}\n  pending 0 a tokens=5 prompt=3")
    (row,) = ir.pending
    assert (len(row.token_ids), row.num_tokens, row.tenant.name) == (3, 5, "default")


def test_ranges_of_rows_are_short() -> None:
    rows: list[Any] = [
        replace(row, request_id=f"r{index}") for index, row in enumerate([*random_ir(1).pending][:1] * 6)
    ]
    ir = replace(random_ir(1), pending=RequestRows.of(rows), decisions=())
    assert str(ir.defer([0, 1, 2, 5], "x").decisions[-1]) == "defer pending 0-2 5 = x"
