"""How full the steps were that could have been fuller."""

from __future__ import annotations

import pytest

from sagellm.core import RequestId, ScheduledRequest, SchedulePlan, ScheduleRequest
from sagellm.core.tokens import pack
from sagellm.engines.core.batching import BatchingMeter


def request(name: str, num_tokens: int, num_computed: int = 0) -> ScheduleRequest:
    made = ScheduleRequest(RequestId(name), pack(range(num_tokens)), 8)
    made.num_computed_tokens = num_computed
    return made


def measured(plan, *, waiting=(), running=(), available=100, budget=64, num_seats=8):
    meter = BatchingMeter(max_num_batched_tokens=budget, max_num_seqs=num_seats)
    meter.measure(
        plan,
        waiting=waiting,
        running=list(running),
        available_blocks=available,
        num_blocks_for=lambda num_tokens: -(-num_tokens // 4),
    )
    return meter.metrics()


def plan_of(*entries, num_admitted=0) -> SchedulePlan:
    return SchedulePlan(
        scheduled_requests=[ScheduledRequest(one, num_tokens, 0) for one, num_tokens in entries],
        num_admitted=num_admitted,
    )


def test_a_step_that_takes_all_that_fits_is_full():
    decode, first, second = request("r", 9, 8), request("a", 20), request("b", 30)
    plan = plan_of((decode, 1), (first, 20), (second, 30), num_admitted=2)
    metrics = measured(plan, waiting=[first, second], running=[decode])
    assert (metrics.num_steps, metrics.batching_efficiency) == (1, 1.0)


def test_what_could_have_been_admitted_and_was_not_counts_against_it():
    decode, first, second = request("r", 9, 8), request("a", 20), request("b", 30)
    metrics = measured(plan_of((decode, 1), (first, 20)), waiting=[first, second], running=[decode])
    assert metrics.batching_efficiency == pytest.approx(21 / 51)


def test_the_budget_is_the_most_that_is_asked_for():
    first = request("a", 200)
    metrics = measured(plan_of((first, 32)), waiting=[first])
    assert metrics.batching_efficiency == 32 / 64


@pytest.mark.parametrize("full", [{"available": 4}, {"num_seats": 1}])
def test_a_step_without_room_for_the_first_that_waits_is_left_out(full):
    decode, first = request("r", 9, 8), request("a", 20)
    metrics = measured(plan_of((decode, 1)), waiting=[first], running=[decode], **full)
    assert (metrics.num_steps, metrics.batching_efficiency) == (0, None)


def test_what_the_cache_has_is_no_work():
    first = request("a", 40)
    first.prefix_cache_hit, first.kv_blocks_needed = 32, 2
    metrics = measured(plan_of((first, 8), num_admitted=1), waiting=[first], available=2)
    assert metrics.batching_efficiency == 1.0
