"""The /metrics page: vLLM's names and meanings with the prefix `sagellm:`, so that its dashboards work.

A metric is declared here and described in docs/http-api.md, which a test compares with the page.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sagellm.core import DEFAULT_TENANT, EngineMetrics, get_logger
from sagellm.core.protocols.engine import STEP_TOKEN_BOUNDS
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.pass_failures import pass_failures
from sagellm.engines.engine_core.policy_metrics import PolicyMetrics
from sagellm.engines.logging import fields
from sagellm.engines.requests.outputs import RequestMetrics, RequestOutput
from sagellm.server.http.admission import TenantUse
from sagellm.server.http.engine_front import EngineFront


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_TTFT = _bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640")
_ITL = _bounds(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_E2E = _bounds("0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_PHASE = _E2E[1:]
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
MAX_TENANTS = 100
"""Tenants with labels of their own; the further ones are one, `other`."""

logger = get_logger(__name__)

_LABELS = ("model_name", "engine")

_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("time from the request's arrival to its first token", _TTFT),
    "inter_token_latency_seconds": ("time between two tokens of a request", _ITL),
    "request_time_per_output_token_seconds": ("mean time of an output token after the first", _ITL),
    "e2e_request_latency_seconds": ("time from the request's arrival to its end", _E2E),
    "request_queue_time_seconds": ("time from the request's arrival to its first step", _PHASE),
    "request_prefill_time_seconds": ("time from the request's first step to its first token", _PHASE),
    "request_decode_time_seconds": ("time from the request's first token to its last", _PHASE),
    "request_inference_time_seconds": ("time from the request's first step to its last token", _PHASE),
    "request_prompt_tokens": ("prompt tokens of a request", _TOKENS),
    "request_generation_tokens": ("tokens generated for a request", _TOKENS),
    "request_max_num_generation_tokens": ("tokens of the longest continuation of a request", _TOKENS),
    "request_params_max_tokens": ("most tokens that a request may generate for each continuation", _TOKENS),
    "request_params_n": ("continuations of a request", (1, 2, 5, 10, 20)),
    "request_num_preemptions": ("preemptions of a request", (0, 1, 2, 3, 4, 5, 10, 20)),
    "request_prefill_kv_computed_tokens": ("prompt tokens of a request that no cache had", _TOKENS),
}
_ALIASES = {"time_per_output_token_seconds": "inter_token_latency_seconds"}  # vLLM's older name
_PASS_COUNTERS = {
    "scheduler_pass_runs": "runs of a pass of the scheduler",
    "scheduler_pass_decisions": "decisions of a pass of the scheduler",
    "scheduler_pass_seconds": "time that a pass of the scheduler took",
}
_DRAFT_COUNTERS = (
    ("num_drafts", "drafts that were verified", "num_drafts"),
    ("num_draft_tokens", "draft tokens that were verified", "num_draft_tokens"),
    ("num_accepted_tokens", "draft tokens that were accepted", "num_accepted_tokens"),
)
_GRAMMAR_COUNTERS: Mapping[str, tuple[str, float, str]] = {
    "structured_output_cached": ("num_cached", 1, "sequences whose grammar had been compiled before"),
    "structured_output_refused": ("num_refused", 1, "sequences whose grammar could not be compiled"),
    "structured_output_compiled": ("num_compiled", 1, "texts that were compiled"),
    "structured_output_compile_seconds": ("compile_ns", 1e9, "time that compiling took, refused texts too"),
    "structured_output_masks": ("num_masks", 1, "masks of sampled positions"),
    "structured_output_mask_seconds": ("mask_ns", 1e9, "time that masks took in the step loop"),
}
_TIMEOUT_S = 4.0

_Family = GaugeMetricFamily | CounterMetricFamily
_Values = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""A figure, or one for each value of a further label, or of two."""


class Histogram:
    """Counts values by upper bounds, which are inclusive as in Prometheus. One thread feeds it."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bound and cumulated count of each bucket."""
        return cumulated(self._bounds, self._counts)


def cumulated(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Return the upper bound and cumulative count of each bucket; the last one has no bound."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


class ServerMetrics(Collector):
    """Counts on the event loop; everything else happens when the page is requested."""

    def __init__(self, model_name: str, tenants: Mapping[str, TenantUse] | None = None) -> None:
        """Start with zeros. `tenants` are those of the server's keys, in their order."""
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._engine, self._config = EngineMetrics(), EngineConfig()
        self._is_up, self._restarts = True, 0
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generation_tokens = 0
        self.num_ended = dict.fromkeys(("stop", "length", "abort", "deadline", "error"), 0)
        self._tenants = {DEFAULT_TENANT.name: TenantUse()} if tenants is None else tenants
        self._label_of = {
            name: name if number < MAX_TENANTS else "other" for number, name in enumerate(self._tenants)
        }
        self.num_tokens_of: dict[str, Counter[str]] = {"prompt": Counter(), "generation": Counter()}

    def render(
        self, engine: EngineMetrics, config: EngineConfig, *, is_up: bool = True, num_restarts: int = 0
    ) -> bytes:
        """Return the page, including the engine's metrics."""
        self._engine, self._config = engine, config
        self._is_up, self._restarts = is_up, num_restarts
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Declare no metrics in advance."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield every metric; prometheus_client calls this."""
        engine = self._engine
        pool, cache = engine.modules.get("kv_pool"), engine.modules.get("prefix_cache")
        total = read(pool, "total_blocks")
        used = engine.num_held_blocks / total if total else 0.0
        waiting = {"capacity": engine.num_waiting - engine.num_deferred, "deferred": engine.num_deferred}
        policy_failure = bool(getattr(cache, "policy_failure", ""))
        failed = {
            "eviction_policy": policy_failure,
            "scheduler_pass": len(pass_failures(engine)),
            "draft_proposer": bool(getattr(engine.modules.get("speculation"), "failure", "")),
            "recorder": bool(getattr(engine.modules.get("recorder"), "failure", "")),
        }
        gauge, counter = self._gauge, self._counter
        yield gauge("engine_up", "1 while /health says 200, else 0", self._is_up)
        yield counter("engine_restarts", "times that the engine's process was started again", self._restarts)
        yield gauge("num_requests_running", "sequences that run", engine.num_running)
        yield gauge("num_requests_waiting", "sequences that wait", engine.num_waiting)
        told = "sequences that wait, for room (capacity) or held back (deferred)"
        yield gauge("num_requests_waiting_by_reason", told, waiting, "reason")
        yield gauge("kv_cache_usage_perc", "share of KV blocks in use", used)
        yield counter("prefix_cache_queries", "tokens looked up", read(cache, "num_lookup_tokens"))
        yield counter("prefix_cache_hits", "tokens found", read(cache, "num_hit_tokens"))
        yield counter("num_preemptions", "preemptions", engine.num_preemptions)
        yield counter("prompt_tokens", "prompt tokens of requests", self.num_prompt_tokens)
        told = "prompt tokens of requests that a cache had"
        yield counter("prompt_tokens_cached", told, self.num_cached_tokens)
        yield counter("generation_tokens", "tokens generated", self.num_generation_tokens)
        yield counter("request_success", "requests by how they ended", self.num_ended, "finished_reason")
        yield from self._speculation()
        yield from self._passes()
        yield from self._structured()
        yield from self._recording()
        yield from self._policies()
        told = "policies, passes, draft proposers and recorders that failed; the engine goes on without them"
        yield gauge("failed_modules", told, failed, "kind")
        yield from self._of_tenants()
        for name in (*_HISTOGRAMS, *_ALIASES):
            source = _ALIASES.get(name, name)
            histogram = self.histograms[source]
            yield self._histogram(name, _HISTOGRAMS[source][0], histogram.buckets(), histogram.total)
        buckets, told = cumulated(STEP_TOKEN_BOUNDS, engine.steps_by_tokens), "tokens computed in a step"
        yield self._histogram(
            "iteration_tokens_total", f"{told} of the engine", buckets, engine.num_computed_tokens
        )
        yield self._cache_config()

    def _speculation(self) -> Iterable[Metric]:
        """Yield what became of drafts, with vLLM's names; no samples if nothing drafts."""
        found, spec = self._engine.modules.get("speculation"), self._config.speculation.proposer
        name = "" if spec is None else spec.name
        for suffix, text, field in _DRAFT_COUNTERS:
            by_name = {} if found is None else {name: getattr(found, field)}
            yield self._counter(f"spec_decode_{suffix}", text, by_name, "proposer")
        places = getattr(found, "num_accepted_by_place", ())
        by_place = {(name, str(place)): number for place, number in enumerate(places)}
        told = "accepted draft tokens by their place in the draft"
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", told, by_place, "proposer", "position")
        seconds = {} if found is None else {name: found.propose_ns / 1e9}
        yield self._counter("spec_decode_proposer_seconds", "time in the draft proposer", seconds, "proposer")

    def _passes(self) -> Iterable[Metric]:
        """Yield what each pass of the scheduler did; passes of one name are added up."""
        counts: dict[str, Counter[str]] = {name: Counter() for name in _PASS_COUNTERS}
        for each in getattr(self._engine.modules.get("scheduler"), "passes", ()):
            figures = (each.num_runs, each.num_decisions, each.total_ns / 1e9)
            for by_pass, figure in zip(counts.values(), figures, strict=True):
                by_pass[each.name] += figure
        for name, text in _PASS_COUNTERS.items():
            yield self._counter(name, text, counts[name], "pass")

    def _structured(self) -> Iterable[Metric]:
        """Yield what requests for structured outputs asked for and what that took."""
        grammar = self._engine.modules.get("grammar")
        kinds = getattr(grammar, "num_requested", {})
        told = "sequences whose grammar is being compiled; they do not wait yet"
        yield self._gauge("num_requests_preparing", told, self._engine.num_preparing)
        told = "sequences with a structured output, by its kind"
        yield self._counter("structured_output_requests", told, kinds, "kind")
        for name, (field, divisor, text) in _GRAMMAR_COUNTERS.items():
            yield self._counter(name, text, read(grammar, field) / divisor)

    def _recording(self) -> Iterable[Metric]:
        """Yield what was recorded since the recording began."""
        recorder = self._engine.modules.get("recorder")
        is_recording = read(recorder, "is_recording")
        yield self._gauge("recording", "1 while finished requests are recorded, else 0", is_recording)
        told = "requests that are in the recording"
        yield self._counter("recorded_requests", told, read(recorder, "num_recorded"))
        told = "requests that the recording lacks, as it could not keep up or failed"
        yield self._counter("recording_dropped_requests", told, read(recorder, "num_dropped"))

    def _policies(self) -> Iterable[Metric]:
        """Yield which policies are in force, what changed them, and what shadows would have saved."""
        found, shadows = self._engine.modules.get("policies"), self._engine.modules.get("shadows")
        names = {(kind, name): 1 for kind, name in getattr(found, "policies", {}).items()}
        yield self._gauge("policy_info", "1 for the policies in force", names, "kind", "policy")
        changes = {
            (kind, who): number
            for kind, by_whom in getattr(found, "num_changes", {}).items()
            for who, number in by_whom.items()
        }
        yield self._counter("policy_changes", "switches of policies, by whom", changes, "kind", "made_by")
        told = "prompt tokens that shadow caches have seen"
        yield self._counter("shadow_cache_queries", told, read(shadows, "num_query_tokens"))
        each_of = getattr(shadows, "shadows", ())
        hits = {
            each.policy: each.num_hit_tokens for each in each_of if each.low is None
        }  # estimates can fall
        told = "prompt tokens that a policy would have saved"
        yield self._counter("shadow_cache_hits", told, hits, "policy")
        rates = {
            (each.policy, bound): value
            for each in each_of
            for bound, value in (
                ("low", each.recent_low),
                ("estimate", each.recent_hit_rate),
                ("high", each.recent_high),
            )
            if value is not None
        }
        told = (
            "share of prompt tokens of the latest 1,000 requests, with the 95 % interval where it is sampled"
        )
        yield self._gauge("shadow_cache_hit_rate", told, rates, "policy", "bound")

    def _of_tenants(self) -> Iterable[Metric]:
        """Yield what each tenant has and gets; labels are the operator's names, or hashes."""
        label_of = self._label_of
        for kind, by_tenant in self.num_tokens_of.items():
            counts = Counter(dict.fromkeys(label_of.values(), 0))
            for tenant, count in by_tenant.items():
                counts[label_of[tenant]] += count
            yield self._counter(f"tenant_{kind}_tokens", f"{kind} tokens by tenant", counts, "tenant")
        live, refused = Counter[str](), Counter[tuple[str, str]]()
        for tenant, use in self._tenants.items():
            live[label_of[tenant]] += use.num_live
            for code in ("queue_full", "tenant_queue_full", "tenant_tokens_full"):
                refused[label_of[tenant], code] += use.num_refused[code]
        yield self._gauge("tenant_sequences", "live sequences by tenant", live, "tenant")
        yield self._counter("requests_refused", "answers 429 by tenant and code", refused, "tenant", "code")

    def _eviction_policy(self) -> str:
        """Return the name of the policy in force, which may have been switched."""
        policies: PolicyMetrics = self._engine.modules.get("policies", PolicyMetrics())
        return policies.in_force("eviction_policy") or self._config.prefix_cache.eviction_policy.name

    def _cache_config(self) -> Metric:
        """Return the KV settings as labels, with vLLM's names where the meaning is the same."""
        config = self._config
        settings = {
            "block_size": config.kv.block_size,
            "num_gpu_blocks": config.kv.num_blocks,
            "cache_dtype": config.model.dtype,
            "enable_prefix_caching": config.prefix_cache.enabled,
            "gpu_memory_utilization": config.kv.memory_fraction,
            "prefix_cache": config.prefix_cache.name.name,
            "eviction_policy": self._eviction_policy(),
        }
        labels = ("engine", *settings)
        family = GaugeMetricFamily(
            "sagellm:cache_config_info", "the KV settings, as labels; always 1", labels=labels
        )
        family.add_metric((self._labels[1], *map(str, settings.values())), 1)
        return family

    def _gauge(self, name: str, text: str, value: _Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(f"sagellm:{name}", text, labels=(*_LABELS, *labels)), value)

    def _counter(self, name: str, text: str, value: _Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(f"sagellm:{name}", text, labels=(*_LABELS, *labels)), value)

    def _filled(self, family: _Family, value: _Values) -> Metric:
        if not isinstance(value, Mapping):
            family.add_metric(self._labels, value)
            return family
        for key, each in value.items():
            family.add_metric((*self._labels, *([key] if isinstance(key, str) else key)), each)
        return family

    def _histogram(self, name: str, text: str, buckets: list[tuple[str, float]], total: float) -> Metric:
        family = HistogramMetricFamily(f"sagellm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, buckets, total)
        return family


class RequestTimer:
    """Follows one request of an engine from its arrival to its end."""

    __slots__ = (
        "_arrived",
        "_first",
        "_is_ended",
        "_last",
        "_limits",
        "_metrics",
        "finish_reasons",
        "measured",
        "num_cached",
        "num_prompt",
        "num_tokens",
        "request_id",
        "tenant",
    )

    def __init__(
        self,
        metrics: ServerMetrics,
        arrived: float,
        request_id: str,
        tenant: str = DEFAULT_TENANT.name,
        limits: tuple[int, int] = (1, 0),
    ) -> None:
        """Start. `limits` are the request's continuations, and the most tokens of each."""
        self._metrics = metrics
        self.request_id, self.tenant = request_id, tenant
        self._arrived, self._limits = arrived, limits
        self.measured: RequestMetrics | None = None  # by the engine, once its last output has come
        self.finish_reasons: list[str] = []  # of its continuations, or why there are none
        self._first = self._last = 0.0
        self.num_tokens = self.num_prompt = self.num_cached = 0
        self._is_ended = False

    def take(self, output: RequestOutput) -> None:
        """Count what is new in an output."""
        num_tokens = output.metrics.num_output_tokens
        num_new = num_tokens - self.num_tokens
        if num_new > 0:
            now = time.perf_counter()
            histograms = self._metrics.histograms
            if not self.num_tokens:
                self._first = now
                self.num_prompt, self.num_cached = len(output.prompt_token_ids), output.num_cached_tokens
                self._metrics.num_prompt_tokens += self.num_prompt
                self._metrics.num_cached_tokens += self.num_cached
                self._metrics.num_tokens_of["prompt"][self.tenant] += self.num_prompt
                histograms["time_to_first_token_seconds"].observe(now - self._arrived)
            else:
                histograms["inter_token_latency_seconds"].observe(now - self._last)
            self._last = now
            self.num_tokens = num_tokens
            self._metrics.num_generation_tokens += num_new
            self._metrics.num_tokens_of["generation"][self.tenant] += num_new
        if output.finished:
            self._finish(output)

    def end(self, reason: str) -> None:
        """Record that the request ended without a last output; only the first end counts."""
        if not self._is_ended:
            self._is_ended = True
            self._metrics.num_ended[reason] += 1
            self.finish_reasons = self.finish_reasons or [reason]
            self._log(reason)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the arrival to the first token, None before there is one."""
        return self._first - self._arrived if self.num_tokens else None

    def seconds(self) -> dict[str, float]:
        """Return the times that are known: to the first token, and in the queue, in prefill and in decode."""
        known = {"first_token_s": self.first_token_s}
        if self.measured is not None:
            known |= {
                "queue_s": self.measured.queue_time,
                "prefill_s": self.measured.prefill_time,
                "decode_s": self.measured.decode_time,
            }
        return {name: round(max(0.0, value), 6) for name, value in known.items() if value is not None}

    def _log(self, reason: str) -> None:
        logger.info(
            "%s: %s after %.3f s, first token after %.3f s; tokens: %d prompt (%d cached), %d generated",
            self.request_id,
            reason,
            time.perf_counter() - self._arrived,
            max(0.0, self._first - self._arrived),
            self.num_prompt,
            self.num_cached,
            self.num_tokens,
            extra=fields(
                request_id=self.request_id,
                tenant=self.tenant,
                finish_reason=reason,
                duration_s=round(time.perf_counter() - self._arrived, 6),
                prompt_tokens=self.num_prompt,
                cached_tokens=self.num_cached,
                output_tokens=self.num_tokens,
                **self.seconds(),
            ),
        )

    def _finish(self, output: RequestOutput) -> None:
        self.measured = output.metrics
        self.finish_reasons = [each.finish_reason or "error" for each in output.outputs]
        self.end(output.outputs[0].finish_reason or "error")
        histograms = self._metrics.histograms
        histograms["e2e_request_latency_seconds"].observe(time.perf_counter() - self._arrived)
        histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        histograms["request_generation_tokens"].observe(self.num_tokens)
        for phase in ("queue", "prefill", "decode", "inference"):
            seconds = getattr(output.metrics, f"{phase}_time")
            if seconds is not None:
                histograms[f"request_{phase}_time_seconds"].observe(max(0.0, seconds))
        num_longest = output.metrics.num_longest_output_tokens
        num_continuations, max_tokens = self._limits
        histograms["request_max_num_generation_tokens"].observe(num_longest)
        histograms["request_params_max_tokens"].observe(max_tokens)
        histograms["request_params_n"].observe(num_continuations)
        histograms["request_num_preemptions"].observe(output.metrics.num_preemptions)
        histograms["request_prefill_kv_computed_tokens"].observe(self.num_prompt - self.num_cached)
        if num_longest > 1:
            mean = (self._last - self._first) / (num_longest - 1)
            histograms["request_time_per_output_token_seconds"].observe(mean)


def read(module: Any, name: str) -> float:
    """Return a module's figure, 0 if it has none."""
    value = getattr(module, name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


class EngineProbe:
    """Fetches the engine's metrics; concurrent calls share one request."""

    def __init__(self, front: EngineFront) -> None:
        self._front = front
        self._asking: asyncio.Task[EngineMetrics] | None = None
        self.last = EngineMetrics()
        self._num_restarts = front.num_restarts

    async def ask(self) -> None:
        """Update `last`, unless the engine does not answer within 4 s.

        An unresponsive engine is not asked, because that is when the page is needed most. A restart resets
        `last`.
        """
        if self._num_restarts != self._front.num_restarts:
            self._num_restarts, self.last = self._front.num_restarts, EngineMetrics()
        if not self._front.is_responsive:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._front.metrics())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        with suppress(Exception):  # even if it is late
            self.last = await asyncio.wait_for(asyncio.shield(self._asking), _TIMEOUT_S)
