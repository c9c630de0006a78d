"""Steps that stay the same are planned once, and nothing that a run tells shows it."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from random import Random
from typing import Any

import pytest

from sagellm.core import (
    EMPTY,
    PluginRegistry,
    Request,
    RequestId,
    SequenceId,
    StepCost,
    Tenant,
    TraceRequest,
    pack,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.scheduler import Scheduler
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.sampling.params import SamplingParams
from sagellm.lab.simulation.served_load import LoadSettings
from sagellm.lab.simulation.serving import ServingRun, simulate_serving, with_passes
from sagellm.lab.simulation.simulated_core import build_simulated_core
from sagellm.lab.simulation.step_costs import StepCosts
from sagellm.lab.simulation.virtual_executor import END, RecordedOutput

COST = StepCost(
    base_ns=1_000_000.3, token_ns=10_000.7, seq_ns=2_000, kv_token_ns=30.1, pair_ns=1.3, prefill_ns=50_000
)
COSTS = StepCosts(
    source="by hand",
    device="cuda",
    step=COST,
    kv_bytes_per_token=1000,
    host_step_ns=7_000.4,
    host_request_ns=900.0,
    tier_bytes_per_s={"host": 1e9},
)
SIZE = 16
PASSES = (
    "",
    "order=none,share=none,preempt=none",
    "order=priority{ageing_s=2},preempt=memory-aware",
    "order=mlfq{max_preempted=1},share=none",
    "order=deadline{ttft_s=0.1}",
    "order=prefix-aware",
)


def load(seed: int, num_requests: int = 40) -> list[TraceRequest]:
    """Make requests that share beginnings, with pauses in which those that run decode alone."""
    rng = Random(seed)
    common = [[rng.randrange(3, 4000) for _ in range(200)] for _ in range(4)]
    made, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(rng.choice((20, 300)))
        prompt = rng.choice(common)[: rng.randint(0, 200)]
        prompt = prompt + [rng.randrange(3, 4000) for _ in range(rng.randint(1, 200))]
        num_output = rng.randint(1, 150)
        output = [rng.randrange(3, 4000) for _ in range(num_output - 1)]
        made.append(
            TraceRequest(
                now_s,
                len(prompt),
                num_output,
                token_ids=pack(prompt),
                output_token_ids=pack(output) if seed % 2 else EMPTY,
                tenant=f"t{rng.randrange(3)}" if seed % 3 else "",
                priority=rng.choice((0, 0, 0, 1)) if seed % 5 == 0 else 0,
            )
        )
    return made


def run(seed: int, num_blocks: int, *, foresees: bool, **values: Any) -> ServingRun:
    config = EngineConfig().with_values(
        {"kv.num_blocks": num_blocks, "kv.block_size": SIZE, "predictor.name": "statistical"}
        | {name.replace("__", "."): value for name, value in values.items()}
    )
    settings = LoadSettings(weights={"t1": 3.0})
    if seed % 4 == 3:
        settings = replace(settings, num_clients=8, think_s=0.05)
    passes = PASSES[seed % len(PASSES)]
    config = with_passes(config, passes) if passes else config
    return simulate_serving(load(seed), config, COSTS, load=settings, foresees=foresees)


@pytest.mark.parametrize(
    ("seed", "num_blocks"), list(zip(range(6), cycle([40, 90, 300, 4000]), strict=False))
)
def test_planning_once_changes_no_result(seed, num_blocks, monkeypatch):
    plans = []
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self, **may: plans.append(1) or schedule(self, **may))
    each = run(seed, num_blocks, foresees=False)
    num_each = len(plans)
    once = run(seed, num_blocks, foresees=True)
    assert once.requests == each.requests
    assert once.figures == each.figures
    assert once.predictor == each.predictor
    assert once.scheduler is not None
    assert each.scheduler is not None
    assert (once.scheduler.num_steps, once.scheduler.num_scheduled_tokens) == (
        each.scheduler.num_steps,
        each.scheduler.num_scheduled_tokens,
    )
    passes = PASSES[seed % len(PASSES)]
    never_rests = "max_preempted" in passes or (seed % 3 and "share=none" not in passes)  # several tenants
    assert num_blocks < 300 or never_rests or len(plans) - num_each < 0.7 * num_each


def test_each_step_is_planned_where_a_tier_sees_them(monkeypatch):
    values = {"kv__tiers": [{"name": "host", "options": {"max_bytes": "2MiB"}}]}
    plans = []
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self, **may: plans.append(1) or schedule(self, **may))
    once, each = (run(1, 120, foresees=foresees, **values) for foresees in (True, False))
    assert once.requests == each.requests
    assert len(plans) >= 2 * once.figures.num_steps


def _ends(seed: int, *, foresees: bool) -> tuple[list[tuple[str, str, int, int]], int]:
    """Run sequences of which some are late, and return how and when each ends, and the number of plans."""
    rng = Random(seed)
    outputs = {SequenceId(str(index)): RecordedOutput(rng.randint(1, 120)) for index in range(20)}
    config = EngineConfig().with_values({"kv.num_blocks": 500, "kv.block_size": SIZE})
    costs = replace(COSTS, host_step_ns=0.0)
    made = build_simulated_core(config, costs, outputs, foresees=foresees, registry=PluginRegistry.load())
    core, clock = made.core, made.clock
    for name in outputs:
        request = Request(
            request_id=RequestId(name),
            token_ids=pack([rng.randrange(3, 100) for _ in range(rng.randint(1, 60))]),
            max_tokens=200,
            tenant=Tenant("t"),
            deadline_ns=rng.choice((None, rng.randrange(10**7, 2 * 10**8))),
        )
        params = SamplingParams(temperature=0.0, max_tokens=200)
        core.add(Sequence.of(QueuedSequence(SequenceId(name), request, params, 0, frozenset({END}))))
    ended, num_plans = [], 0
    while core.has_unfinished():
        num_plans += 1
        for output in core.step():
            if output.finish_reason is not None:
                ended.append(
                    (output.sequence_id, output.finish_reason, clock.now_ns(), made.executor.num_steps)
                )
    core.kv.check_integrity()
    core.close()
    return ended, num_plans


@pytest.mark.parametrize("seed", range(6))
def test_a_deadline_passes_at_the_same_step(seed):
    each, num_each = _ends(seed, foresees=False)
    once, num_once = _ends(seed, foresees=True)
    assert once == each
    assert {reason for _, reason, _, _ in once} >= {"stop", "deadline"}
    assert num_once < 0.7 * num_each
