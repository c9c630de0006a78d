"""Measures an engine in this process: throughput over many prompts, latency of one batch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from sagellm.core import ConfigError
from sagellm.engines.metrics.cache import token_hit_rate
from sagellm.engines.metrics.latency import itl_s, throughput, total_throughput
from sagellm.engines.metrics.limits import Limits, engine_limits
from sagellm.engines.progress import RequestShares, progress_bar
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.figures import Spread, rates_of_tenths, spread
from sagellm.lab.bench.prompts import PromptMaker, PromptSettings
from sagellm.lab.bench.roofline import RooflineFigures, roofline_figures
from sagellm.lab.traces.lengths import DEFAULT_INPUT, DEFAULT_OUTPUT, Lengths

if TYPE_CHECKING:
    from sagellm.core import RequestId
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
class ReachedFigures:
    """How close a run came to the limits that were measured with it; None if the engine counts no work."""

    mfu: float | None
    mfu_error: str | None
    bandwidth_use: float | None
    roofline_ratio: float | None
    peak_gflops_per_s: float
    gemm_gflops_per_s: float | None
    read_bandwidth_gbytes_per_s: float
    peak_source: str
    bandwidth_source: str


@dataclass(frozen=True, kw_only=True)
class ThroughputFigures(ReachedFigures):
    """One run of all prompts at once."""

    num_requests: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_draft_tokens: int | None  # None if there were none
    draft_acceptance: float | None  # share of draft tokens that were accepted
    token_hit_rate: float
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    total_throughput_tokens_per_s: float
    batching_efficiency: float | None  # of the steps in which a waiting request could have been admitted
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    output_tenths_tokens_per_s: Spread | None  # in each tenth of the run: how steady the throughput was


@dataclass(frozen=True, kw_only=True)
class LatencyFigures(ReachedFigures):
    """Repeated runs of one batch, each with its own prompts; every request's TTFT, TPOT and ITL.

    The share of the limits is over all timed batches, prefill and decode together.
    """

    batch_size: int
    latency_ms: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """The memory of an engine's process. `peak_rss_mib` is VmHWM; KV memory is taken when it is used."""

    peak_rss_mib: float
    weight_mib: float | None
    kv_capacity_mib: float | None
    beyond_mib: float | None  # peak − weights − KV capacity: negative where not all KV was used


def memory_figures(engine: LLMEngine) -> MemoryFigures:
    """Read the peak so far, and what the engine says about weights and KV."""
    from sagellm.engines.machine import peak_rss_mib

    model = engine.metrics().modules.get("model_family")
    weights = None if model is None else model.weight_bytes / 2**20
    num_blocks = engine.config.kv.num_blocks
    layout = engine.layout
    kv = None if num_blocks is None or layout is None else num_blocks * layout.block_bytes / 2**20
    peak = peak_rss_mib()
    beyond = None if weights is None or kv is None else peak - weights - kv
    return MemoryFigures(peak_rss_mib=peak, weight_mib=weights, kv_capacity_mib=kv, beyond_mib=beyond)


def measure_throughput(
    engine: LLMEngine, settings: OfflineSettings, *, progress: bool = False
) -> ThroughputFigures:
    """Run all prompts at once, after `warmup` others one by one. Raises BenchmarkError if one fails."""
    workload = _Workload(engine, settings)
    for _ in range(settings.warmup):
        workload.run(1)
    _forget_steps(engine)
    before = engine.metrics().modules
    with engine.unseen_steps():
        batch = workload.run(settings.num_prompts, progress=progress)
    after = engine.metrics().modules
    batching = after["batching"] - before["batching"] if "batching" in after else None
    outputs = batch.outputs
    num_prompt = sum(len(one.prompt_token_ids) for one in outputs)
    num_cached = sum(one.num_cached_tokens for one in outputs)
    num_output = sum(len(one.outputs[0].token_ids) for one in outputs)
    drafts = sum(one.metrics.num_draft_tokens for one in outputs)
    accepted = sum(one.metrics.num_accepted_tokens for one in outputs)
    clock = {"start_ns": batch.start_ns, "end_ns": batch.end_ns}
    return ThroughputFigures(
        num_requests=len(outputs),
        duration_s=batch.duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_output_tokens=num_output,
        num_draft_tokens=drafts or None,
        draft_acceptance=accepted / drafts if drafts else None,
        token_hit_rate=token_hit_rate(num_cached, num_prompt),
        request_throughput_per_s=throughput(len(outputs), **clock),
        output_throughput_tokens_per_s=throughput(num_output, **clock),
        total_throughput_tokens_per_s=total_throughput(num_prompt, num_output, **clock),
        batching_efficiency=None if batching is None else batching.batching_efficiency,
        ttft_ms=spread(batch.ttfts_ms),
        tpot_ms=spread(batch.tpots_ms),
        itl_ms=spread(batch.itls_ms),
        output_tenths_tokens_per_s=spread(rates_of_tenths(batch.token_times_ns.values(), **clock)),
        **_reached(engine, before, after, batch.duration_s),
    )


def _forget_steps(engine: LLMEngine) -> None:
    """Leave what warmed up out of the profile, if there is one."""
    if engine.profile is not None:
        engine.profile.clear()


def _reached(
    engine: LLMEngine, before: Mapping[str, Any], after: Mapping[str, Any], time_s: float
) -> dict[str, Any]:
    """Measure the machine's limits, and set the work between two readings against them."""
    limits: Limits = engine_limits(engine.config)
    reached: RooflineFigures | None = None
    if "work" in after:
        reached = roofline_figures(after["work"] - before["work"], time_s, limits)
    gemm = limits.gemm_flops_per_s
    return {
        "mfu": None if reached is None else reached.mfu,
        "mfu_error": None if reached is None else reached.mfu_error,
        "bandwidth_use": None if reached is None else reached.bandwidth_use,
        "roofline_ratio": None if reached is None else reached.roofline_ratio,
        "peak_gflops_per_s": limits.peak_flops_per_s / 1e9,
        "gemm_gflops_per_s": None if gemm is None else gemm / 1e9,
        "read_bandwidth_gbytes_per_s": limits.read_bandwidth_bytes_per_s / 1e9,
        "peak_source": limits.peak_source,
        "bandwidth_source": limits.bandwidth_source,
    }


def measure_latency(
    engine: LLMEngine, settings: OfflineSettings, *, progress: bool = False
) -> LatencyFigures:
    """Run batches of `num_prompts`, after `warmup` of them. Raises BenchmarkError if a prompt fails."""
    workload = _Workload(engine, settings)
    total = settings.warmup + settings.repeats
    batches: list[_Batch] = []
    with progress_bar("measuring", total=total, unit="batches", enabled=progress) as advance:
        for _ in range(settings.warmup):
            workload.run(settings.num_prompts)
            advance(1)
        _forget_steps(engine)
        before = engine.metrics().modules
        for _ in range(settings.repeats):
            batches.append(workload.run(settings.num_prompts))
            advance(1)
    after = engine.metrics().modules
    busy_s = sum(batch.duration_s for batch in batches)
    return LatencyFigures(
        batch_size=settings.num_prompts,
        latency_ms=spread(batch.duration_s * 1e3 for batch in batches),
        ttft_ms=spread(value for batch in batches for value in batch.ttfts_ms),
        tpot_ms=spread(value for batch in batches for value in batch.tpots_ms),
        itl_ms=spread(value for batch in batches for value in batch.itls_ms),
        **_reached(engine, before, after, busy_s),
    )


class _Batch(NamedTuple):
    """What a batch returned, and when it ran."""

    outputs: list[RequestOutput]
    token_times_ns: dict[RequestId, list[int]]  # when a step that made tokens of a request returned
    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def ttfts_ms(self) -> list[float]:
        return [one.metrics.ttft * 1e3 for one in self.outputs if one.metrics.ttft is not None]

    @property
    def tpots_ms(self) -> list[float]:
        return [one.metrics.tpot * 1e3 for one in self.outputs if one.metrics.tpot is not None]

    @property
    def itls_ms(self) -> list[float]:
        return [gap * 1e3 for times in self.token_times_ns.values() for gap in itl_s(times)]


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
        while self._engine.use_idle_time():  # as a server does
            pass
        start_ns = time.perf_counter_ns()
        ids = [self._engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        total = {one: len(prompts[n]) + (params[n].max_tokens or 0) for n, one in enumerate(ids)}
        with progress_bar("measuring", total=sum(total.values()), unit="tokens", enabled=progress) as advance:
            finished, times = self._run_to_end(RequestShares(total, advance))
        end_ns = time.perf_counter_ns()
        outputs = [finished[one] for one in ids]
        _check(outputs)
        return _Batch(outputs, times, start_ns, end_ns)

    def _run_to_end(
        self, shares: RequestShares
    ) -> tuple[dict[RequestId, RequestOutput], dict[RequestId, list[int]]]:
        """Step until all requests have ended; return them, and when each one's tokens came."""
        finished: dict[RequestId, RequestOutput] = {}
        times: defaultdict[RequestId, list[int]] = defaultdict(list)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_ns = time.perf_counter_ns()
            for output in outputs:
                seen = times[output.request_id]
                num_tokens = output.metrics.num_output_tokens
                seen += [now_ns] * (num_tokens - len(seen))
                done = len(output.prompt_token_ids) + num_tokens
                shares.take(output.request_id, done, is_finished=output.finished)
                if output.finished:
                    finished[output.request_id] = output
            shares.show()
        return finished, dict(times)


def _check(outputs: Sequence[RequestOutput]) -> None:
    failed = [one.outputs[0].error for one in outputs if one.outputs[0].finish_reason == "error"]
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")
