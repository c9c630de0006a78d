"""Urgent requests do not wait for prompts that run."""

from __future__ import annotations

import pytest

from sagellm.core import TokenIds
from sagellm.core.ids import RequestId
from sagellm.kvmgr.scheduler_ir import PrefixHit, RequestRows, ScheduleIR, ScheduleRequest
from sagellm.kvmgr.scheduler_ir.passes import PriorityBasedPass


def row(name: str, num_tokens: int, num_computed_tokens: int = 0, **values: float) -> ScheduleRequest:
    return ScheduleRequest(
        request_id=RequestId(name),
        token_ids=TokenIds(bytes(4 * num_tokens)),
        max_tokens=8,
        num_tokens=num_tokens,
        num_computed_tokens=num_computed_tokens,
        num_blocks=-(-num_tokens // 16) if num_computed_tokens else 0,
        **values,  # type: ignore[arg-type]
    )


def schedule(*pending: ScheduleRequest, now: float = 1.0, available_memory: int = 100) -> ScheduleIR:
    running = (row("long", 900, 200), row("decoding", 33, 32), row("urgent too", 500, 100, priority=1))
    return ScheduleIR(
        pending=RequestRows.of(pending),
        running=RequestRows.of(running),
        available_memory=available_memory,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=16,
        now=now,
        probe=lambda request: PrefixHit(0, -(-request.num_tokens // 16)),
    )


def test_prompts_below_a_waiting_request_make_way_for_it():
    ir = PriorityBasedPass().run(schedule(row("short", 40, priority=1)))
    assert ir.caps("running").tolist() == [1, 2**31 - 1, 2**31 - 1]


@pytest.mark.parametrize(
    "ir",
    [
        schedule(row("short", 40)),
        schedule(row("short", 40, priority=1), available_memory=2),
        schedule(row("short", 40, priority=1)).defer([0], "a test wants it"),
        schedule(row("late", 40, priority=1, arrived_time=95.0), now=100.0),
    ],
    ids=["of the same level", "without blocks", "deferred", "of the level that waiting gave"],
)
def test_prompts_run_on_if_none_that_could_start_is_above_them(ir):
    assert PriorityBasedPass().run(ir).caps("running").min() > 1
