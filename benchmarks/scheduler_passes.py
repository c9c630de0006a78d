"""What each scheduler pass costs a step, beside a long queue.

`python benchmarks/scheduler_passes.py [--waiting N] [--running N] [--json]`: rows as arrays, as the engine
keeps them; eight tenants, predictions and a known cost of steps. Case "full": no seat is free and blocks
suffice, so only fair-share has much to decide. Case "admits": a seat is free, blocks are short, and each step
one request leaves the queue and another comes. Microseconds of `run` and of verifying what it decided.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from common import report, spread

from sagellm.core import (
    PrefixHit,
    RequestRows,
    ScheduleIR,
    ScheduleRequest,
    SchedulerPassProtocol,
    StepCost,
)
from sagellm.core.protocols.request_rows import SCHEDULE_COLUMNS
from sagellm.kvmgr.scheduler_ir.passes import (
    AdmissionLimitPass,
    BatchingEfficiencyPass,
    ChunkedPrefillPass,
    DeadlinePass,
    FairSharePass,
    MemoryAwarePreemptionPass,
    MLFQPass,
    PrefixCacheAwarePass,
    PriorityBasedPass,
    ShortestFirstPass,
)
from sagellm.kvmgr.scheduler_ir.schedule_verifier import verify_rewrite

PASSES: tuple[SchedulerPassProtocol, ...] = (
    BatchingEfficiencyPass(),
    ChunkedPrefillPass(),
    DeadlinePass(ttft_s=1, tpot_ms=50),
    FairSharePass(),
    MemoryAwarePreemptionPass(),
    MLFQPass(),
    PrefixCacheAwarePass(),
    PriorityBasedPass(),
    ShortestFirstPass(),
    AdmissionLimitPass(max_seats=8),
)
COST = StepCost(base_ns=1e7, token_ns=1e5, seq_ns=1e5, kv_token_ns=1e3)
NUM_STEPS = 200


def make_columns(num_rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return columns of random requests."""
    prompts = rng.integers(16, 2000, num_rows)
    values: dict[str, Any] = {
        "priority": rng.integers(0, 3, num_rows),
        "arrived_time": np.sort(rng.random(num_rows)),
        "num_prompt_tokens": prompts,
        "num_tokens": prompts + 1,
        "num_computed_tokens": np.zeros(num_rows),
        "num_blocks": np.zeros(num_rows),
        "last_scheduled_step": np.full(num_rows, -1),
        "predicted_remaining_tokens": rng.random(num_rows) * 500,
        "confidence": rng.random(num_rows),
        "max_tokens": np.full(num_rows, 512),
        "deadline": np.where(rng.random(num_rows) < 0.5, np.inf, rng.random(num_rows) * 100),
        "tenant": rng.integers(0, 8, num_rows),
        "weight": np.ones(num_rows),
        "is_trusted": np.zeros(num_rows),
        "key": rng.integers(0, 1 << 62, num_rows),
    }
    return {name: np.asarray(values[name], dtype) for name, dtype in SCHEDULE_COLUMNS.items()}


def measure(optimization_pass: SchedulerPassProtocol, options: argparse.Namespace, *, admits: bool) -> Any:
    """Return the microseconds of a step."""
    rng = np.random.default_rng(0)
    waiting, running = make_columns(2 * options.waiting + NUM_STEPS, rng), make_columns(options.running, rng)
    running["num_computed_tokens"] = running["num_tokens"] - 1
    running["num_blocks"] = -(-running["num_tokens"] // 16)
    request = ScheduleRequest("r", range(100), 8)
    state, took_us = optimization_pass.start(), []
    for step in range(NUM_STEPS):
        first = step if admits else 0
        index = np.arange(first, first + options.waiting)
        ir = ScheduleIR(
            pending=RequestRows(waiting, index, lambda _: request),
            running=RequestRows(running, np.arange(options.running), lambda _: request),
            available_memory=1 if admits else 100_000,
            max_num_batched_tokens=2048,
            max_num_seqs=options.running + admits,
            block_size=16,
            step=step,
            now=2.0 + step / 50,
            cost=COST,
            step_target_ms=50,
            probe=lambda _: PrefixHit(16, 6),
            epoch=first,
            state=state,
        )
        started_ns = time.perf_counter_ns()
        verify_rewrite(optimization_pass.name, ir, optimization_pass.run(ir))
        took_us.append((time.perf_counter_ns() - started_ns) / 1e3)
    return spread(took_us[10:], 1)


def main() -> None:
    """Measure all passes and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=int, default=1000, help="requests in the queue [1000]")
    parser.add_argument("--running", type=int, default=32, help="requests that decode [32]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = {
        each.name: {case: measure(each, options, admits=case == "admits") for case in ("full", "admits")}
        for each in PASSES
    }
    if options.json:
        report("scheduler_passes", waiting=options.waiting, running=options.running, us=found)
        return
    print(f"{options.waiting} waiting, {options.running} running; µs a step, min and median")
    for name, cases in found.items():
        texts = (f"{case} {took['min']:7.1f} {took['median']:7.1f}" for case, took in cases.items())
        print(f"{name:16} {'   '.join(texts)}")


if __name__ == "__main__":
    main()
