"""/metrics: vLLM's names and meanings."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sagellm.engines.server.histogram import Histogram

LABELS = {"model_name": "small", "engine": "0"}
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
COUNTERS = [
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
]


def read(server):
    """Return every sample as {name: {labels: value}}."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(families, family, sample, **labels):
    for entry in families[f"sagellm:{family}"].samples:
        if entry.name == f"sagellm:{sample}" and entry.labels == {**LABELS, **labels}:
            return entry.value
    raise AssertionError(f"no sample {sample} {labels}")


@pytest.mark.parametrize(
    ("kind", "names"), [("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)]
)
def test_the_names_are_vllms(server, kind, names):
    families = read(server)
    assert {name: families[f"sagellm:{name}"].type for name in names} == dict.fromkeys(names, kind)


def test_counts_follow_requests(server, complete):
    before = read(server)
    usage = complete("Bread needs flour, water", max_tokens=9, ignore_eos=True)["usage"]
    after = read(server)

    def grown(family, sample, **labels):
        return value(after, family, sample, **labels) - value(before, family, sample, **labels)

    assert grown("prompt_tokens", "prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("generation_tokens", "generation_tokens_total") == 9
    assert grown("request_success", "request_success_total", finished_reason="length") == 1
    assert grown("prefix_cache_queries", "prefix_cache_queries_total") == usage["prompt_tokens"]
    for name, count in (
        ("time_to_first_token_seconds", 1),
        ("inter_token_latency_seconds", 8),
        ("time_per_output_token_seconds", 8),
        ("request_time_per_output_token_seconds", 1),
        ("e2e_request_latency_seconds", 1),
        ("request_prompt_tokens", 1),
        ("request_generation_tokens", 1),
    ):
        assert grown(name, f"{name}_count") == count
        assert grown(name, f"{name}_bucket", le="+Inf") == count
    assert grown("request_generation_tokens", "request_generation_tokens_sum") == 9
    assert grown("request_generation_tokens", "request_generation_tokens_bucket", le="5.0") == 0
    assert grown("request_generation_tokens", "request_generation_tokens_bucket", le="10.0") == 1


def test_hits_of_the_prefix_cache_are_tokens(server, complete):
    prompt = "The clock in the station is wrong by seven minutes. " * 4
    complete(prompt)
    before = read(server)
    cached = complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
    name = "prefix_cache_hits"
    assert cached > 0
    assert value(read(server), name, f"{name}_total") - value(before, name, f"{name}_total") == cached


def test_nothing_is_in_use_when_nothing_runs(server):
    families = read(server)
    assert [value(families, name, name) for name in GAUGES] == [0, 0, 0]


def test_what_runs_is_what_the_engine_says(scripted):
    families = read(scripted())
    assert value(families, "num_requests_running", "num_requests_running") == 3
    assert value(families, "num_requests_waiting", "num_requests_waiting") == 5


@pytest.mark.parametrize(
    ("script", "reason"), [(("a", "length"), "length"), (("a", "error"), "error"), (("a", "abort"), "abort")]
)
def test_requests_are_counted_by_their_end(scripted, script, reason):
    server = scripted(*script)
    server.http.post("/v1/completions", json={"prompt": [1]})
    families = read(server)
    for each in ("stop", "length", "abort", "error"):
        counted = value(families, "request_success", "request_success_total", finished_reason=each)
        assert counted == (each == reason)


def test_what_is_refused_is_no_request(server):
    before = read(server)
    assert (
        server.http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [515]}).status_code == 400
    )
    assert server.http.post("/v1/completions", json={"prompt": "a", "n": 0}).status_code == 400
    after = read(server)
    for reason in ("stop", "length", "abort", "error"):
        name = "request_success_total"
        assert value(after, "request_success", name, finished_reason=reason) == value(
            before, "request_success", name, finished_reason=reason
        )


def test_a_model_name_is_escaped(scripted):
    server = scripted(served_model_name=('a"b\\c\nd',))
    samples = read(server)["sagellm:num_requests_running"].samples
    assert samples[0].labels["model_name"] == 'a"b\\c\nd'


def test_a_histogram_counts_by_inclusive_bounds():
    histogram = Histogram((1, 2.5))
    for number in (0, 1, 1.5, 2.5, 9):
        histogram.observe(number)
    assert histogram.buckets() == [("1.0", 2), ("2.5", 4), ("+Inf", 5)]
    assert histogram.total == 14
