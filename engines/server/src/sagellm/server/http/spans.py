"""Spans of OpenTelemetry: one per request that generates, sent to a collector by a thread of their own.

Attributes follow the semantic conventions for generative AI, and where these have no name, vLLM's
(`gen_ai.latency.*`). No text of a prompt or an answer is in them. Needs the extra `otel`, whose libraries are
imported by `Spans.open` alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sagellm.core import ConfigError
from sagellm.engines import __version__
from sagellm.server.http.access_log import NotedStatus
from sagellm.server.http.answer_ids import CHAT, COMPLETION

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from sagellm.engines.config.sections import ServerConfig
    from sagellm.server.http.metrics import RequestTimer
    from sagellm.server.http.shape import Job

_OPERATIONS = {"/v1/chat/completions": ("chat", CHAT), "/v1/completions": ("text_completion", COMPLETION)}
"""Path of a request that gets a span → `gen_ai.operation.name`, and how the answer's id begins."""

_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CONTEXT = (b"traceparent", b"tracestate")
_LAST_S = 2.0
_MAX_REASONS = 128
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_LATENCIES = {
    "time_in_queue": "queue_time",
    "time_in_model_prefill": "prefill_time",
    "time_in_model_decode": "decode_time",
    "time_in_model_inference": "inference_time",
}


def check_spans(settings: ServerConfig) -> None:
    """Raise ConfigError if spans are wanted and cannot be made, or their collector is not a URL."""
    endpoint = settings.otlp_traces_endpoint
    if not _is_wanted(settings):
        return
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"server.otlp_traces_endpoint is {endpoint!r}; it must be the URL of a collector that takes OTLP "
            "over HTTP, such as http://127.0.0.1:4318"
        )
    if missing := [name for name in _MODULES if not _is_installed(name)]:
        raise ConfigError(
            f"spans need {' and '.join(missing)}, which cannot be found; "
            "pip install 'sagellm-server[otel]', or unset server.otlp_traces_endpoint and "
            f"{' and '.join(_VARIABLES)}"
        )


def _is_wanted(settings: ServerConfig) -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return settings.otlp_traces_endpoint is not None or any(os.environ.get(name) for name in _VARIABLES)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent is missing
        return False


class Spans:
    """Makes spans. The exporter has a thread and a bounded queue: what it cannot send in time is dropped.

    Everything else is as the variables of OpenTelemetry say: the sampler, the queue, headers, time limits.
    """

    def __init__(self, provider: Any) -> None:
        """Take a TracerProvider of the SDK."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("sagellm", __version__)
        self._read_context = TraceContextTextMapPropagator().extract
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    @classmethod
    def open(cls, settings: ServerConfig) -> Spans | None:
        """Return what sends spans to the collector of the settings, None if there is none.

        Raises ConfigError, as `check_spans` does.
        """
        check_spans(settings)
        if not _is_wanted(settings):
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        endpoint = settings.otlp_traces_endpoint
        if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        own = Resource({"service.name": "sagellm", "service.version": __version__})
        provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def start(self, scope: Scope) -> Any:
        """Begin the span of a request, in the trace that its `traceparent` names."""
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT
        }
        operation, _ = _OPERATIONS[scope["path"]]
        given = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "sagellm",
            "http.request.method": scope["method"],
            "url.path": scope["path"],
        }
        context = self._read_context(carrier) if carrier else None
        return self._tracer.start_span(operation, context, self._kind, given)

    def end(self, span: Any, scope: Scope, status: int) -> None:
        """End a span with what became of its request; status 0: the client left before an answer."""
        state = scope["state"]
        if span.is_recording():
            failure: str | None = state.get("failure") or ("" if status else "client_left")
            if status:
                span.set_attribute("http.response.status_code", status)
            if failure or status >= 500:
                span.set_attribute("error.type", failure or str(status))
            if (tenant := state.get("tenant")) is not None:
                span.set_attribute("sagellm.tenant", tenant.name)
            if status >= 500 or (failure and 200 <= status < 300):  # amid a stream
                span.set_status(self._failed)
            if (job := state.get("job")) is not None:
                operation, prefix = _OPERATIONS[scope["path"]]
                span.update_name(f"{operation} {job.model}")
                span.set_attribute("gen_ai.response.id", f"{prefix}-{job.id}")
                span.set_attributes(_of_job(job))
                span.set_attributes(_of_answer(job, state["timers"]))
        span.end()

    def close(self) -> None:
        """Send what is left, for at most 2 s; what a collector has not taken by then is lost."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_LAST_S)


def _of_job(job: Job) -> dict[str, Any]:
    """Return the attributes of what a request asks for."""
    params = job.params
    given = {f"gen_ai.request.{name}": getattr(params, name) for name in _SAMPLING}
    given |= {
        "gen_ai.request.model": job.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.choice.count": None if job.num_choices == 1 else job.num_choices,
        "gen_ai.request.stream": job.is_streamed or None,
        "gen_ai.response.model": job.model,
    }
    return {name: value for name, value in given.items() if value is not None}


def _of_answer(job: Job, timers: Sequence[RequestTimer]) -> dict[str, Any]:
    """Return the attributes of what was generated: tokens of all prompts, the longest times among them."""
    reasons = [reason for each in timers for reason in each.finish_reasons]
    given: dict[str, Any] = {
        "gen_ai.response.finish_reasons": reasons[:_MAX_REASONS],
        "gen_ai.usage.input_tokens": sum(each.num_prompt for each in timers),
        "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached for each in timers),
        "gen_ai.usage.output_tokens": sum(each.num_tokens for each in timers),
    }
    firsts = [seconds for each in timers if (seconds := each.first_token_s) is not None]
    if firsts:
        given["gen_ai.latency.time_to_first_token"] = max(firsts)
        if job.is_streamed:
            given["gen_ai.response.time_to_first_chunk"] = min(firsts)
    measured = [each.measured for each in timers if each.measured is not None]
    for name, source in _LATENCIES.items():
        known = [seconds for each in measured if (seconds := getattr(each, source)) is not None]
        if known:
            given[f"gen_ai.latency.{name}"] = max(known)
    return given


class SpanMiddleware:
    """ASGI middleware around the application: a span for each request to an endpoint that generates.

    It leaves the trace's id in `scope["state"]["trace_id"]`, for the access log.
    """

    def __init__(self, app: ASGIApp, *, spans: Spans) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and end its span when it has ended."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
            await self._app(scope, receive, send)
            return
        span = self._spans.start(scope)
        scope.setdefault("state", {})["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        noted = NotedStatus(send)
        try:
            await self._app(scope, receive, noted)
        finally:
            self._spans.end(span, scope, scope["state"].get("status", noted.status))
