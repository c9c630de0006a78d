"""Spans of OpenTelemetry, as a collector receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sagellm.core import ConfigError
from sagellm.engines.config import ServerConfig
from sagellm.server.http import spans
from sagellm.server.http.spans import Spans, check_spans

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
COMPLETION = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED")


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP, in protobuf."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.exports: list = []
        self.paths: list[str] = []
        self.answers = threading.Event()  # if clear, it hangs
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[dict]:
        return [
            {
                "name": span.name,
                "kind": span.kind,
                "trace": span.trace_id.hex(),
                "parent": span.parent_span_id.hex(),
                "took_s": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                "is_failed": span.status.code == 2,
                **{each.key: plain(each.value) for each in span.attributes},
            }
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.answers.wait()
        self.server.paths.append(self.path)
        self.server.exports.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def plain(value):
    kind = value.WhichOneof("value")
    return list(map(plain, value.array_value.values)) if kind == "array_value" else getattr(value, kind)


@pytest.fixture(autouse=True)
def without_variables(monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # ms between exports
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.answers.set()
    server.shutdown()
    server.server_close()


def test_a_request_is_a_span_in_its_clients_trace(collector, serve, until):
    server = serve(otlp_traces_endpoint=collector.url)
    body = {"messages": [{"role": "user", "content": "Is it far?"}], "max_tokens": 4, "top_p": 0.9}
    answer = server.http.post("/v1/chat/completions", json=body, headers=TRACEPARENT).json()
    until(collector.spans)
    [span] = collector.spans()
    usage = answer["usage"]
    expected = {
        "name": "chat small",
        "kind": 2,  # SERVER
        "trace": TRACE,
        "parent": PARENT,
        "is_failed": False,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sagellm",
        "gen_ai.request.model": "small",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "small",
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }
    assert expected.items() <= span.items()
    first, queue, prefill = (
        span[f"gen_ai.latency.{name}"]
        for name in ("time_to_first_token", "time_in_queue", "time_in_model_prefill")
    )
    assert 0 < queue + prefill <= first <= span["took_s"]
    assert collector.paths == ["/v1/traces"]
    [resource] = {str(each.resource) for export in collector.exports for each in export.resource_spans}
    assert '"sagellm"' in resource
    assert "far" not in "".join(map(str, collector.exports))


def test_a_stream_of_many_prompts_is_one_span(collector, serve, until):
    server = serve(otlp_traces_endpoint=f"{collector.url}/v1/traces")
    body = {**COMPLETION, "prompt": [[5, 6, 7], [8, 9]], "n": 2, "stream": True}
    server.http.post("/v1/completions", json=body).read()
    until(collector.spans)
    [span] = collector.spans()
    assert (span["name"], span["parent"], len(span["trace"])) == ("text_completion small", "", 32)
    assert span["gen_ai.request.choice.count"] == 2
    assert span["gen_ai.request.stream"]
    assert (span["gen_ai.usage.input_tokens"], span["gen_ai.usage.output_tokens"]) == (5, 16)
    assert span["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert 0 < span["gen_ai.response.time_to_first_chunk"] <= span["gen_ai.latency.time_to_first_token"]
    assert collector.paths == ["/v1/traces"]


def test_failures_are_told_from_refusals_and_other_paths_have_no_span(collector, scripted, until):
    server = scripted("a", "error", otlp_traces_endpoint=collector.url)
    server.http.post("/v1/completions", json={"prompt": [1], "n": 0})
    server.http.post("/v1/completions", json={"prompt": [1]})
    server.http.post("/v1/completions", json={"prompt": [1], "stream": True}).read()
    server.http.get("/v1/models")
    server.http.get("/v1/completions")
    until(lambda: len(collector.spans()) == 3)
    found = [(each["http.response.status_code"], each["is_failed"]) for each in collector.spans()]
    assert found == [(400, False), (500, True), (200, True)]
    kinds = [each["error.type"] for each in collector.spans()]
    assert kinds[0] == "invalid_value"
    assert all(kinds)


def test_a_client_that_leaves_is_told(collector, scripted, until):
    server = scripted(*["a"] * 100_000, otlp_traces_endpoint=collector.url)
    with server.http.stream("POST", "/v1/completions", json={"prompt": [1], "stream": True}) as answer:
        next(answer.iter_lines())
    until(collector.spans)
    [span] = collector.spans()
    assert span["gen_ai.response.finish_reasons"] == ["abort"]
    assert span["gen_ai.usage.output_tokens"] > 0


def test_an_unsampled_trace_stays_so(collector, serve, until):
    server = serve(otlp_traces_endpoint=collector.url)
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    server.http.post("/v1/completions", json=COMPLETION, headers=unsampled)
    server.http.post("/v1/completions", json=COMPLETION, headers={"traceparent": "nonsense"})
    until(collector.spans)
    [span] = collector.spans()
    assert span["trace"] != TRACE


def test_a_collector_that_hangs_delays_no_answer_and_no_end(collector, serve, until):
    collector.answers.clear()
    server = serve(otlp_traces_endpoint=collector.url)
    exporting = [server.http.post("/v1/completions", json=COMPLETION).status_code for _ in range(20)]
    assert exporting == [200] * 20
    assert not collector.exports
    server.app.state.spans.close()  # gives up after 2 s, of the 10 for which the exporter would wait
    assert not collector.exports


def test_the_variables_of_opentelemetry_turn_it_on_and_off(collector, monkeypatch):
    assert Spans.open(ServerConfig()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    found = Spans.open(ServerConfig())
    assert found is not None
    found.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert Spans.open(ServerConfig(otlp_traces_endpoint=collector.url)) is None


def test_without_the_extra_the_setting_is_an_error_that_names_it(monkeypatch):
    def find_spec(name: str) -> object:
        if name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(name)
        return None

    monkeypatch.setattr(spans, "find_spec", find_spec)
    check_spans(ServerConfig())
    with pytest.raises(ConfigError) as caught:
        check_spans(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318"))
    assert "spans need opentelemetry.sdk and opentelemetry.exporter.otlp.proto.http" in str(caught.value)
    assert "pip install 'sagellm-server[otel]'" in str(caught.value)


def test_a_collector_that_is_no_url_is_an_error_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is 'collector:4318'; it must be the"):
        check_spans(ServerConfig(otlp_traces_endpoint="collector:4318"))
