"""Measures an engine in this process: throughput over many prompts, latency of one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from sagellm.core import ConfigError, throughput, total_throughput
from sagellm.engines.bench.errors import BenchmarkError
from sagellm.engines.bench.figures import Spread, spread
from sagellm.engines.bench.prompts import PromptMaker, PromptSettings
from sagellm.engines.bench.roofline import measure_limits, roofline_figures
from sagellm.engines.progress import progress_bar
from sagellm.engines.traces.lengths import DEFAULT_INPUT, DEFAULT_OUTPUT, Lengths

if TYPE_CHECKING:
    import torch

    from sagellm.engines import LLMEngine, RequestOutput


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """The workload of an engine. `num_prompts` run at once; for latency, `repeats` times."""

    num_prompts: int
    input_len: Lengths = DEFAULT_INPUT
    output_len: Lengths = DEFAULT_OUTPUT
    prefix_share: float = 0.0
    num_prefixes: int = 1
    warmup: int = 1
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, smallest in {"num_prompts": 1, "warmup": 0, "repeats": 1}.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")
        PromptSettings(prefix_share=self.prefix_share, num_prefixes=self.num_prefixes)  # checks them

    def shown(self) -> dict[str, Any]:
        """Return what a result keeps."""
        return asdict(self) | {"input_len": str(self.input_len), "output_len": str(self.output_len)}


@dataclass(frozen=True, kw_only=True)
class ThroughputFigures:
    """One run of `LLMEngine.generate` over all prompts."""

    num_requests: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    total_throughput_tokens_per_s: float
    batching_efficiency: float | None  # of the steps in which a waiting request could have been admitted
    mfu: float | None  # None for an engine that does not count work; likewise bandwidth_use
    bandwidth_use: float | None
    peak_gflops_per_s: float
    read_bandwidth_gbytes_per_s: float
    peak_source: str


@dataclass(frozen=True, kw_only=True)
class LatencyFigures:
    """Repeated runs of one batch, each with its own prompts; every request's TTFT and TPOT."""

    batch_size: int
    latency_ms: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None


def measure_throughput(
    engine: LLMEngine, settings: OfflineSettings, *, progress: bool = False
) -> ThroughputFigures:
    """Run all prompts at once, after `warmup` others one by one. Raises BenchmarkError if one fails."""
    workload = _Workload(engine, settings)
    for _ in range(settings.warmup):
        workload.run(1)
    before = engine.metrics().modules
    outputs, start_ns, end_ns = workload.run(settings.num_prompts, progress=progress)
    after = engine.metrics().modules
    limits = measure_limits(*_place(engine))
    reached = None
    if "work" in after:
        reached = roofline_figures(before["work"], after["work"], (end_ns - start_ns) / 1e9, limits)
    batching = after["batching"] - before["batching"] if "batching" in after else None
    num_prompt = sum(len(one.prompt_token_ids) for one in outputs)
    num_output = sum(len(one.outputs[0].token_ids) for one in outputs)
    clock = {"start_ns": start_ns, "end_ns": end_ns}
    return ThroughputFigures(
        num_requests=len(outputs),
        duration_s=(end_ns - start_ns) / 1e9,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(one.num_cached_tokens for one in outputs),
        num_output_tokens=num_output,
        request_throughput_per_s=throughput(len(outputs), **clock),
        output_throughput_tokens_per_s=throughput(num_output, **clock),
        total_throughput_tokens_per_s=total_throughput(num_prompt, num_output, **clock),
        batching_efficiency=None if batching is None else batching.batching_efficiency,
        mfu=None if reached is None else reached.mfu,
        bandwidth_use=None if reached is None else reached.bandwidth_use,
        peak_gflops_per_s=limits.peak_flops_per_s / 1e9,
        read_bandwidth_gbytes_per_s=limits.read_bandwidth_bytes_per_s / 1e9,
        peak_source=limits.peak_source,
    )


def _place(engine: LLMEngine) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of an engine; an engine that loads no model leaves "auto" unresolved."""
    from sagellm.engines.loading.device_and_dtype import resolve_device, resolve_dtype

    model = engine.config.model
    return resolve_device(model.device), resolve_dtype(model.dtype, {})


def measure_latency(
    engine: LLMEngine, settings: OfflineSettings, *, progress: bool = False
) -> LatencyFigures:
    """Run batches of `num_prompts`, after `warmup` of them. Raises BenchmarkError if a prompt fails."""
    workload = _Workload(engine, settings)
    latencies_ms, ttfts_ms, tpots_ms = [], [], []
    total = settings.warmup + settings.repeats
    with progress_bar("measuring", total=total, unit="batches", enabled=progress) as advance:
        for repeat in range(-settings.warmup, settings.repeats):
            outputs, start_ns, end_ns = workload.run(settings.num_prompts)
            advance(1)
            if repeat < 0:
                continue
            latencies_ms.append((end_ns - start_ns) / 1e6)
            ttfts_ms += [one.metrics.ttft * 1e3 for one in outputs if one.metrics.ttft is not None]
            tpots_ms += [one.metrics.tpot * 1e3 for one in outputs if one.metrics.tpot is not None]
    return LatencyFigures(
        batch_size=settings.num_prompts,
        latency_ms=spread(latencies_ms),
        ttft_ms=spread(ttfts_ms),
        tpot_ms=spread(tpots_ms),
    )


class _Batch(NamedTuple):
    """What a batch returned, and when it ran."""

    outputs: list[RequestOutput]
    start_ns: int
    end_ns: int


class _Workload:
    """Prompts that never repeat, run to their full length."""

    def __init__(self, engine: LLMEngine, settings: OfflineSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._lengths = Random(f"lengths {settings.seed}")
        self._prompts = PromptMaker(
            PromptSettings(
                vocab_size=engine.vocab_size,
                prefix_share=settings.prefix_share,
                num_prefixes=settings.num_prefixes,
            ),
            settings.seed,
        )

    def run(self, num_prompts: int, *, progress: bool = False) -> _Batch:
        """Generate a batch. Raises BenchmarkError if a prompt fails."""
        from sagellm.engines.sampling.params import SamplingParams

        settings, rng = self._settings, self._lengths
        prompts = [self._prompts.make(settings.input_len.draw(rng)) for _ in range(num_prompts)]
        params = [
            SamplingParams(temperature=0.0, max_tokens=settings.output_len.draw(rng), ignore_eos=True)
            for _ in range(num_prompts)
        ]
        start_ns = time.perf_counter_ns()
        outputs = self._engine.generate(prompts, params, progress=progress)
        end_ns = time.perf_counter_ns()
        _check(outputs)
        return _Batch(outputs, start_ns, end_ns)


def _check(outputs: Sequence[RequestOutput]) -> None:
    failed = [one.outputs[0].error for one in outputs if one.outputs[0].finish_reason == "error"]
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")
