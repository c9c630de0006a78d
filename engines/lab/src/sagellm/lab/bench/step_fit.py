"""Fits what steps cost to steps measured on the real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from sagellm.core import (
    BlockId,
    ConfigError,
    PluginRegistry,
    Runtime,
    StepCost,
    StepWork,
    TraceRequest,
    hookimpl,
    pack,
)
from sagellm.core.request import StepRecord
from sagellm.engines.config.bounded_json import parse_json
from sagellm.engines.engine_core.step_cost_fit import fit_step_cost
from sagellm.engines.machine import describe_machine
from sagellm.engines.metrics.latency import percentile
from sagellm.engines.progress import progress_bar
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.prompts import draw_ids
from sagellm.lab.files import write_json_lines
from sagellm.lab.simulation.step_costs import StepCosts

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.engines.engine_core.core import EngineCore
    from sagellm.lab.simulation.served_load import LoadSettings, ServedRequest

_LEAST_STEPS = 20
_ROUND_TOKENS = 65_536
_HELD_OUT = 5
"""One step in so many is not fitted, but judged."""


class MeasuredStep(NamedTuple):
    """What a step computed, and how long planning, computing and recording it took."""

    work: StepWork
    took_ns: int


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How the mix of steps is made: rounds of requests, each run to its end, for `duration_s` seconds.

    A round has 1 … `max_seqs` requests with prompts of up to some length below `max_prompt_tokens`, half of
    which begin alike. Both limits are drawn log-uniformly, that of prompts as the largest of four draws, so
    the steps cover batches, contexts and chunks of all sizes. Without long contexts beside short chunks
    nothing would tell their costs apart. All requests of a round have at most 65,536 tokens and half of the
    KV memory.
    """

    duration_s: float = 60.0
    max_seqs: int = 256
    max_prompt_tokens: int = 1024
    max_output_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class FitFigures:
    """How well a fit predicts steps; errors are |predicted − measured| ÷ measured.

    `held_out` errors are those of steps that were not fitted, every fifth one, before the final fit of all.
    """

    num_steps: int
    median_error: float
    p90_error: float
    held_out_median_error: float
    held_out_total_error: float  # predicted ÷ measured − 1, over those steps together
    total_s: float
    step: dict[str, float]  # the coefficients, in nanoseconds


class StepRecorder:
    """An observer that keeps what each step computed and took."""

    def __init__(self) -> None:
        self.steps: list[MeasuredStep] = []

    @hookimpl
    def sagellm_step_finished(self, record: StepRecord) -> None:
        """Keep a step that computed something."""
        if record.work is not None:
            self.steps.append(MeasuredStep(record.work, record.finished_ns - record.started_ns))


class RecordedCore:
    """A loaded core whose steps are recorded. `clock` is the machine's unless another is given.

    All memory of the KV is written first: a page that the machine has yet to give takes longer, and no step
    tells which of its blocks are on such pages. Full collections of garbage stay out of the steps of this
    process, as they do in a served core's.
    """

    def __init__(self, config: EngineConfig, runtime: Runtime | None = None) -> None:
        from sagellm.engines.assembly import load_core
        from sagellm.server.remote.core_process import settle_collector

        recorder, registry = StepRecorder(), PluginRegistry.load()
        registry.register(recorder, distribution="sagellm-step-recorder")
        runtime = runtime or Runtime.system(seed=0)
        self._recorder = recorder
        self._outside: list[tuple[int, int, int]] = []  # of each run: steps, requests, ns outside steps
        self._model = config.model.name
        self.clock = runtime.clock
        self.core: EngineCore = load_core(config, registry=registry, runtime=runtime)
        while self.core.use_idle_time():  # as a server does
            pass
        with progress_bar("writing KV memory", total=0):
            self._touch_memory()
        settle_collector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()

    def _touch_memory(self) -> None:
        limits = self.core.info.limits
        assert limits is not None, "an engine that loads a model has limits"
        self.core.steps.copy_blocks([(BlockId(0), BlockId(each)) for each in range(1, limits.num_blocks)])

    def run(
        self, requests: Sequence[TraceRequest], load: LoadSettings | None = None
    ) -> tuple[list[ServedRequest], list[MeasuredStep]]:
        """Run requests to their ends; return them and their steps. Raises BenchmarkError if one fails."""
        from sagellm.lab.simulation.served_load import LoadRun, LoadSettings

        self._recorder.steps = []
        run = LoadRun(self.core, self.clock, requests, load or LoadSettings())
        started_ns = self.clock.now_ns()
        served = run.run()
        took_ns = self.clock.now_ns() - started_ns - run.slept_ns
        steps = self._recorder.steps
        self._outside.append((len(steps), len(requests), took_ns - sum(one.took_ns for one in steps)))
        for one in served:
            if one.error is not None:
                raise BenchmarkError(f"a request failed: {one.error}")
        return served, steps

    def rounds(self, settings: FitSettings) -> Iterator[list[MeasuredStep]]:
        """Yield the steps of one round of the mix after the other, for ever. The first finds caches cold."""
        limits = self.core.info.limits
        assert limits is not None, "an engine that loads a model has limits"
        rng = Random(f"fit {settings.seed}")
        longest = min(settings.max_prompt_tokens, limits.max_model_len - settings.max_output_tokens - 1)
        settings = replace(settings, max_prompt_tokens=max(1, longest))
        while True:
            yield self.run(_round(rng, settings, limits.vocab_size, limits.num_blocks * limits.block_size))[1]

    def costs(self) -> StepCosts:
        """Return its costs without the fit of steps; those of the host are from the runs so far."""
        info = self.core.info
        limits, layout = info.limits, info.layout
        assert limits is not None, "an engine that loads a model has limits"
        assert layout is not None, "and a layout of its KV"
        host = _HostCosts.of(self._outside)
        return StepCosts(
            source="not fitted yet",
            device="cuda" if str(info.settings["model.device"]).startswith("cuda") else "cpu",
            step=StepCost(base_ns=1.0),
            host_step_ns=host.step_ns,
            host_request_ns=host.request_ns,
            kv_bytes_per_token=layout.block_bytes // layout.block_size,
            kv_memory_bytes=limits.num_blocks * layout.block_bytes,
            about={"model": self._model, "dtype": info.settings["model.dtype"]},
        )


def measure_steps(
    config: EngineConfig, settings: FitSettings, *, progress: bool = False
) -> tuple[list[MeasuredStep], StepCosts]:
    """Run the mix of steps; return them, and costs without the fit."""
    steps: list[MeasuredStep] = []
    with RecordedCore(config) as recorded:
        rounds, clock = recorded.rounds(settings), recorded.clock
        with progress_bar("warming up", total=0, enabled=progress):
            next(rounds)
        shown_ns = clock.now_ns()
        end_ns = shown_ns + round(settings.duration_s * 1e9)
        total = round(settings.duration_s)
        with progress_bar("measuring", total=total, unit="seconds", enabled=progress) as advance:
            while len(steps) < _LEAST_STEPS or shown_ns < end_ns:
                steps += next(rounds)
                now_ns = clock.now_ns()
                advance((now_ns - shown_ns) / 1e9)
                shown_ns = now_ns
        return steps, recorded.costs()


def fit_steps(steps: Sequence[MeasuredStep], costs: StepCosts) -> tuple[StepCosts, FitFigures]:
    """Fit steps and complete their costs. Raises BenchmarkError for too few.

    The fit is of steps that nothing disturbs. What slow ones take beyond it comes now and then, whatever a
    step computes, so it is added to what the host takes between steps: the total is that of all steps.
    """
    if len(steps) < _LEAST_STEPS:
        raise BenchmarkError(f"{len(steps)} steps were recorded; a fit needs at least {_LEAST_STEPS}")
    held_out = steps[::_HELD_OUT]
    fitted = [step for number, step in enumerate(steps) if number % _HELD_OUT]
    first = fit_step_cost(fitted)
    judged = errors_of(first, held_out)
    cost = fit_step_cost(steps)
    errors = errors_of(cost, steps)
    figures = FitFigures(
        num_steps=len(steps),
        median_error=median(errors),
        p90_error=percentile(errors, 90),
        held_out_median_error=median(judged),
        held_out_total_error=total_error_of(first, held_out),
        total_s=sum(one.took_ns for one in steps) / 1e9,
        step=asdict(cost),
    )
    machine = describe_machine()
    model = costs.about.get("model", "a model")
    about = {**costs.about, "num_steps": len(steps), "errors": asdict(figures), "machine": machine}
    source = f"fitted to {len(steps):,} steps of {model}, measured on {machine['cpu']}"
    source += f" (median error of a step {figures.median_error:.0%})"
    slow_ns = max(0.0, sum(one.took_ns - cost.predict_ns(one.work) for one in steps)) / len(steps)
    host_step_ns = costs.host_step_ns + slow_ns
    return replace(costs, source=source, step=cost, host_step_ns=host_step_ns, about=about), figures


class _HostCosts(NamedTuple):
    """What the host takes between two steps, and more for each request."""

    step_ns: float = 0.0
    request_ns: float = 0.0

    @classmethod
    def of(cls, outside: Sequence[tuple[int, int, int]]) -> Self:
        """Fit the time outside steps to the steps and requests of runs; neither coefficient is negative."""
        if not outside:
            return cls()
        rows = np.array(outside, np.float64)
        step_ns, request_ns = np.linalg.lstsq(rows[:, :2], rows[:, 2], rcond=None)[0].tolist()
        num_steps, num_requests, total_ns = rows.sum(axis=0).tolist()
        if step_ns < 0:
            return cls(0.0, max(total_ns, 0.0) / num_requests)
        return cls(step_ns, request_ns) if request_ns >= 0 else cls(max(total_ns, 0.0) / num_steps)


def errors_of(cost: StepCost, steps: Sequence[MeasuredStep]) -> list[float]:
    """Return |predicted − measured| ÷ measured of each step."""
    return [abs(cost.predict_ns(one.work) / one.took_ns - 1) for one in steps]


def total_error_of(cost: StepCost, steps: Sequence[MeasuredStep]) -> float:
    """Return predicted ÷ measured − 1 of all steps together."""
    return sum(cost.predict_ns(one.work) for one in steps) / sum(one.took_ns for one in steps) - 1


def write_steps(path: Path, steps: Sequence[MeasuredStep]) -> None:
    """Write measured steps, one JSON object per line. Raises ConfigError if the file cannot be written."""
    write_json_lines(path, (step.work._asdict() | {"took_ns": step.took_ns} for step in steps), "steps")


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read measured steps. Raises ConfigError, which names the line."""
    steps = []
    try:
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                steps.append(_step(text, line))
    except OSError as error:
        raise ConfigError(f"the steps {path} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"the steps {path}: {error}") from error
    return steps


def _step(text: bytes, line: int) -> MeasuredStep:
    names = (*StepWork._fields, "took_ns")
    try:
        row = parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"line {line}: {error}") from error
    if not isinstance(row, dict) or set(row) != set(names):
        raise ConfigError(f"line {line} must have {', '.join(names)} and nothing else")
    for name in names:
        least = 0 if name in ("num_pairs", "num_prefills") else 1
        if type(row[name]) is not int or row[name] < least:
            raise ConfigError(f"line {line}: {name} is {row[name]!r}; it must be an int of at least {least}")
    return MeasuredStep(StepWork(*(row[name] for name in StepWork._fields)), row["took_ns"])


def _round(rng: Random, settings: FitSettings, vocab_size: int, num_kv_tokens: int) -> list[TraceRequest]:
    """Make requests that all arrive at once and fit into the KV memory together."""
    num_requests = _log_uniform(rng, settings.max_seqs)
    longest = max(_log_uniform(rng, settings.max_prompt_tokens) for _ in range(4))  # mostly long ones
    common = draw_ids(rng, longest, vocab_size)
    requests: list[TraceRequest] = []
    num_left = min(num_kv_tokens // 2, _ROUND_TOKENS)
    for _ in range(num_requests):
        num_tokens = rng.randint(1, longest)
        num_left -= num_tokens + settings.max_output_tokens
        if requests and num_left < 0:
            break
        num_common = rng.randint(0, num_tokens) if rng.random() < 0.5 else 0
        prompt = common[:num_common] + draw_ids(rng, num_tokens - num_common, vocab_size)
        num_output_tokens = rng.randint(1, settings.max_output_tokens)
        requests.append(TraceRequest(0.0, num_tokens, num_output_tokens, token_ids=pack(prompt)))
    return requests


def _log_uniform(rng: Random, most: int) -> int:
    return min(most, int((most + 1) ** rng.random()))
