"""Random states of a scheduler: waiting requests, running requests, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from sagellm.core.ids import RequestId
from sagellm.core.protocols.request_rows import RequestRows, ScheduleRequest
from sagellm.core.protocols.scheduler_ir import ScheduleIR
from sagellm.core.runtime import Randomness
from sagellm.core.step_cost import StepCost
from sagellm.core.tenant import DEFAULT_TENANT, Tenant
from sagellm.core.tokens import TokenIds
from sagellm.testing.schedule_simulation import Limits

TENANTS = (DEFAULT_TENANT, Tenant("red", 2.0), Tenant("blue", 0.5), Tenant("gold", 1.0, is_trusted=True))
"""Tenants of random schedules."""

State = tuple[list[ScheduleRequest], list[ScheduleRequest], Limits]


def random_state(rng: Random) -> State:
    """Make waiting and running requests, and limits large enough for them."""
    limits = Limits(
        max_num_batched_tokens=rng.choice((1, 5, 64, 2048)),
        max_num_seqs=rng.randint(1, 12),
        block_size=rng.choice((1, 8, 16)),
        available_memory=rng.choice((0, 1, rng.randint(0, 40), 1000)),
    )
    pending = [waiting_request(rng, f"p{i}") for i in range(rng.randint(0, 8))]
    running = [
        _started(rng, waiting_request(rng, f"r{i}"), limits.block_size)
        for i in range(rng.randint(0, limits.max_num_seqs))
    ]
    return pending, running, limits


def waiting_request(rng: Random, name: str) -> ScheduleRequest:
    """Make a request of which nothing has been computed."""
    num_tokens = rng.randint(1, 200)
    return ScheduleRequest(
        request_id=RequestId(name),
        token_ids=TokenIds(bytes(4 * num_tokens)),
        max_tokens=rng.randint(1, 100),
        priority=rng.choice((0, 0, 2, -1)),
        arrived_time=float(rng.randint(0, 5)),
        prefix_cache_hit=rng.choice((0, rng.randint(0, num_tokens - 1))),
        kv_blocks_needed=rng.choice((None, rng.randint(0, 20))),
    )


def _started(rng: Random, request: ScheduleRequest, block_size: int) -> ScheduleRequest:
    num_tokens = request.num_tokens + rng.randint(0, 20)
    num_computed = rng.choice((num_tokens - 1, rng.randint(0, num_tokens)))
    return replace(
        request,
        num_tokens=num_tokens,
        num_computed_tokens=num_computed,
        num_blocks=-(-num_computed // block_size) + rng.choice((0, 0, 3)),
        last_scheduled_step=rng.randint(-1, 3),
    )


def make_ir(state: State, step: int = 0) -> ScheduleIR:
    """Make the schedule of a state, one second a step."""
    pending, running, limits = state
    return ScheduleIR(
        pending=RequestRows.of(pending),
        running=RequestRows.of(running),
        available_memory=limits.available_memory,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        block_size=limits.block_size,
        step=step,
        now=float(step),
    )


def random_ir(seed: int) -> ScheduleIR:
    """Make the schedule of a random state with tenants and predictions; a third of them know their cost."""
    randomness = Randomness(seed)
    pending, running, limits = random_state(randomness.stream("ir"))
    rng = randomness.stream("ir columns")
    tenants = TENANTS[: rng.randint(1, len(TENANTS))]
    pending, running = ([_decorated(rng, row, tenants) for row in rows] for rows in (pending, running))
    ir = make_ir((pending, running, limits), seed)
    if rng.randrange(3):
        return ir
    cost = StepCost(base_ns=1e7, token_ns=1e5, seq_ns=1e5, kv_token_ns=1e3, pair_ns=rng.choice((0.0, 50.0)))
    return replace(ir, cost=cost, step_target_ms=rng.choice((None, 1.0, 50.0)))


def _decorated(rng: Random, row: ScheduleRequest, tenants: Sequence[Tenant]) -> ScheduleRequest:
    is_predicted = rng.random() < 0.5
    return replace(
        row,
        tenant=rng.choice(tenants),
        predicted_remaining_tokens=float(rng.randint(1, 200)) if is_predicted else None,
        confidence=rng.random() if is_predicted else None,
        deadline=rng.choice((None, None, float(rng.randint(0, 60)))),
    )


def decoding_request(name: str) -> ScheduleRequest:
    """A running request with one token to compute and room for it."""
    return ScheduleRequest(
        request_id=RequestId(name),
        token_ids=TokenIds(bytes(4 * 20)),
        max_tokens=64,
        num_tokens=21,
        num_computed_tokens=20,
        num_blocks=2,
    )
