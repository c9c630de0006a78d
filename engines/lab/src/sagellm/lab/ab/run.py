"""One run of one configuration; as a module, a process of its own that reads a job and writes lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Literal

from sagellm.core import ConfigError, SageLLMError, TraceRequest
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.metrics.latency import tpot_s
from sagellm.engines.progress import Advance
from sagellm.lab.ab.metrics import COLUMNS

if TYPE_CHECKING:
    from sagellm.lab.simulation.served_load import ServedRequest
    from sagellm.lab.simulation.serving_figures import ServingLimits

Mode = Literal["serving", "cache", "belady", "unlimited"]
"""Serving on virtual time, or a replay: of the cache alone, with the optimal eviction, without a limit."""

_REPORT_EVERY = 20
_LOOK_S = 0.5
_NO_ROOM = "their prompts found no room, and count as not saved"

Rows = dict[str, list[float | None]]
"""Values of each request by the name of their column; None where a request has none."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is told: a trace, a configuration by dotted keys, and how it is run."""

    name: str
    trace: str
    config: Mapping[str, Any]
    mode: Mode
    reader: str | None = None
    limit: int | None = None
    cost: str | None = None
    oracle_error: float | None = None
    load: Mapping[str, Any] = field(default_factory=dict)  # LoadSettings
    limits: Mapping[str, float] = field(default_factory=dict)  # ServingLimits


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of each request; `error` is that of the first one that failed."""

    rows: Rows
    num_failed: int = 0
    error: str | None = None


def run_job(job: Job, advance: Advance) -> Result:
    """Run a job in this process; `advance` is told of requests."""
    from sagellm.lab.traces import read_trace

    requests = read_trace(job.trace, name=job.reader, limit=job.limit)
    config = EngineConfig.from_values(job.config)
    if job.mode == "serving":
        return _serve(job, requests, config, advance)
    return _replay(job.mode, requests, config, advance)


def _serve(job: Job, requests: Sequence[TraceRequest], config: EngineConfig, advance: Advance) -> Result:
    from sagellm.lab.simulation.oracle import OraclePredictor
    from sagellm.lab.simulation.served_load import LoadSettings, output_lens
    from sagellm.lab.simulation.serving import simulate_serving
    from sagellm.lab.simulation.serving_figures import ServingLimits
    from sagellm.lab.simulation.step_costs import read_step_costs

    assert job.cost is not None, "serving has costs"
    costs, limits = read_step_costs(Path(job.cost)), ServingLimits(**job.limits)
    predictor = None
    if job.oracle_error is not None:
        predictor = OraclePredictor(output_lens(requests), error=job.oracle_error)
    load = LoadSettings(**job.load)
    done = simulate_serving(
        requests, config, costs, load=load, limits=limits, predictor=predictor, advance=advance
    )
    return serving_result(done.requests, limits, costs.prefill_ns)


def serving_result(
    served: Sequence[ServedRequest], limits: ServingLimits, prefill_ns: Callable[[int], float]
) -> Result:
    """Return what became of requests as values to compare; one that failed is not good, and has no other."""
    from sagellm.lab.simulation.serving_figures import is_good

    rows: Rows = {name: [] for name in COLUMNS}
    for one in served:
        values = _values(one) | {"good": float(is_good(one, limits, prefill_ns))}
        for name, column in rows.items():
            column.append(values.get(name))
    errors = [one.error for one in served if one.error is not None]
    return Result(rows=rows, num_failed=len(errors), error=errors[0] if errors else None)


def _values(one: ServedRequest) -> dict[str, float | None]:
    if one.error is not None or one.first_token_ns is None or one.finished_ns is None:
        return {}
    wait_ns = None if one.scheduled_ns is None else one.scheduled_ns - one.arrival_ns
    return {
        "ttft_s": (one.first_token_ns - one.arrival_ns) / 1e9,
        "tpot_s": tpot_s(one.first_token_ns, one.finished_ns, one.num_output_tokens),
        "latency_s": (one.finished_ns - one.arrival_ns) / 1e9,
        "wait_s": None if wait_ns is None else wait_ns / 1e9,
        "saved": one.num_cached_tokens,
        "prompt": one.num_prompt_tokens,
    }


def _replay(mode: Mode, requests: Sequence[TraceRequest], config: EngineConfig, advance: Advance) -> Result:
    from sagellm.lab.simulation.bounds import replay, replay_belady, replay_unlimited

    run = {"cache": replay, "belady": replay_belady, "unlimited": replay_unlimited}[mode]
    replayed = run(requests, config, advance)
    rows: Rows = {
        "saved": [one.num_saved_tokens for one in replayed],
        "prompt": [one.num_prompt_tokens for one in replayed],
    }
    num_refused = sum(one.is_refused for one in replayed)
    return Result(rows=rows, num_failed=num_refused, error=_NO_ROOM if num_refused else None)


def main(lines: Iterable[str], out: IO[str]) -> int:
    """Run the job that the input holds; write how far it is, then its result or the error."""
    job = Job(**json.loads("".join(lines)))
    num_done = 0.0

    def advance(amount: float) -> None:
        nonlocal num_done
        num_done += amount
        if num_done >= _REPORT_EVERY:
            out.write(f'{{"done": {num_done}}}\n')
            out.flush()
            num_done = 0.0

    found: dict[str, Any]
    try:
        found = {"result": asdict(run_job(job, advance))}
    except SageLLMError as error:
        found = {"error": str(error), "is_usage": isinstance(error, ConfigError)}
    out.write(json.dumps({"done": num_done}) + "\n" + json.dumps(found) + "\n")
    return 0


def _end_with(parent: int) -> None:
    """End this process once its parent has ended, however that was."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)  # whatever else a plugin prints is not a result
        sys.exit(main(sys.stdin, results))
