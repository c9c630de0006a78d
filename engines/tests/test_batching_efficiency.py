"""How full the steps were that could have been fuller."""

from __future__ import annotations

import numpy as np
import pytest

from sagellm.core import RequestRows, SchedulePlan, ScheduleRequest
from sagellm.core.protocols.scheduler_ir import Admission
from sagellm.engines.engine_core.batching import BatchingMeter


def request(name: str, num_tokens: int, num_computed: int = 0) -> ScheduleRequest:
    return ScheduleRequest(name, range(num_tokens), 8, num_computed_tokens=num_computed)


def measured(running, waiting=(), *, served=(), admitted=(), available=100, budget=64, num_seats=8):
    """Measure a plan of served (running row, tokens) and admitted (waiting row, tokens, blocks, hit)."""
    meter = BatchingMeter(max_num_batched_tokens=budget, max_num_seqs=num_seats)
    running, waiting = RequestRows.of(running), RequestRows.of(waiting)
    rows, num_tokens = np.array(served, np.int32).reshape(-1, 2).T
    plan = SchedulePlan(
        pending=waiting,
        running=running,
        rows=rows,
        num_tokens=num_tokens,
        num_new_blocks=np.zeros_like(rows),
        admitted=[Admission(*each) for each in admitted],
    )
    meter.measure(
        plan,
        waiting=waiting,
        running=running,
        available_blocks=available,
        num_blocks_for=lambda num_tokens: -(-num_tokens // 4),
    )
    return meter.metrics()


DECODE = request("r", 9, 8)


def test_a_step_that_takes_all_that_fits_is_full():
    waiting = [request("a", 20), request("b", 30)]
    metrics = measured([DECODE], waiting, served=[(0, 1)], admitted=[(0, 20, 5, 0), (1, 30, 8, 0)])
    assert (metrics.num_steps, metrics.batching_efficiency) == (1, 1.0)


def test_what_could_have_been_admitted_and_was_not_counts_against_it():
    waiting = [request("a", 20), request("b", 30)]
    metrics = measured([DECODE], waiting, served=[(0, 1)], admitted=[(0, 20, 5, 0)])
    assert metrics.batching_efficiency == pytest.approx(21 / 51)


def test_the_budget_is_the_most_that_is_asked_for():
    metrics = measured([], [request("a", 200)], admitted=[(0, 32, 50, 0)])
    assert metrics.batching_efficiency == 32 / 64


@pytest.mark.parametrize("full", [{"available": 4}, {"num_seats": 1}])
def test_a_step_without_room_for_the_first_that_waits_is_left_out(full):
    metrics = measured([DECODE], [request("a", 20)], served=[(0, 1)], **full)
    assert (metrics.num_steps, metrics.batching_efficiency) == (0, None)


def test_what_the_cache_has_is_no_work():
    metrics = measured([], [request("a", 40)], admitted=[(0, 8, 2, 32)], available=2)
    assert metrics.batching_efficiency == 1.0
