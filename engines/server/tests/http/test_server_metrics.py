"""/metrics: vLLM's names and meanings."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sagellm.core import (
    EngineMetrics,
    PassMetrics,
    Runtime,
    SchedulerMetrics,
    StepCost,
    VirtualClock,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.pass_failures import PassFailures
from sagellm.engines.testing.steps import let_steps_take
from sagellm.server.http.metrics import Histogram, ServerMetrics

LABELS = {"model_name": "small", "engine": "0"}
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
VLLM_GAUGES = [*GAUGES, "num_requests_waiting_by_reason"]
PHASES = ["queue", "prefill", "decode", "inference"]
COUNTERS = [
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
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
    ("kind", "names"), [("gauge", VLLM_GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)]
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
        *((f"request_{phase}_time_seconds", 1) for phase in PHASES),
        ("iteration_tokens_total", 9),
        ("request_prompt_tokens", 1),
        ("request_generation_tokens", 1),
    ):
        assert grown(name, f"{name}_count") == count
        assert grown(name, f"{name}_bucket", le="+Inf") == count
    assert grown("request_generation_tokens", "request_generation_tokens_sum") == 9
    assert grown("request_generation_tokens", "request_generation_tokens_bucket", le="5.0") == 0
    assert grown("request_generation_tokens", "request_generation_tokens_bucket", le="10.0") == 1


def test_phases_of_a_request_add_up_to_what_it_took(server, complete):
    before = read(server)
    complete("Bread needs flour, water", max_tokens=30, ignore_eos=True)
    after = read(server)

    def took(name):
        sample = f"{name}_sum"
        return value(after, name, sample) - value(before, name, sample)

    phases = {phase: took(f"request_{phase}_time_seconds") for phase in PHASES}
    assert all(seconds > 0 for seconds in phases.values())
    assert phases["inference"] == pytest.approx(phases["prefill"] + phases["decode"])
    assert phases["queue"] + phases["inference"] <= took("e2e_request_latency_seconds")


def test_a_request_that_waits_spends_its_time_in_the_queue(serve, hold, until):
    clock = VirtualClock()
    server = serve(engine={"max_num_seqs": 1, "runtime": replace(Runtime.system(seed=0), clock=clock)})
    let_steps_take(server.front.engine, clock, StepCost(base_ns=1e6))
    go_on = hold(server.front.engine)
    body = {"prompt": [[5, 6, 7], [7, 8, 9]], "max_tokens": 40, "ignore_eos": True}
    asking = threading.Thread(target=server.http.post, args=("/v1/completions",), kwargs={"json": body})
    asking.start()
    until(lambda: server.front.engine.metrics().num_waiting == 2)
    go_on.set()
    asking.join()
    families = read(server)
    waited, took = (
        value(families, name, f"{name}_sum")
        for name in ("request_queue_time_seconds", "request_inference_time_seconds")
    )
    # 40 steps of a millisecond each; the second waits for the first.
    assert (waited, took) == (pytest.approx(0.04), pytest.approx(0.08))


def test_tokens_are_counted_by_step(serve):
    server = serve()
    prompt = list(range(10, 110))
    server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, "ignore_eos": True})
    families = read(server)
    name = "iteration_tokens_total"
    assert value(families, name, f"{name}_sum") == 100 + 4
    assert value(families, name, f"{name}_bucket", le="1.0") == 4
    assert value(families, name, f"{name}_bucket", le="64.0") == 4
    assert value(families, name, f"{name}_bucket", le="128.0") == 5


def test_the_settings_of_the_cache_are_labels(server):
    (sample,) = read(server)["sagellm:cache_config_info"].samples
    config = server.front.config
    assert sample.value == 1
    assert sample.labels["engine"] == "0"
    assert sample.labels["num_gpu_blocks"] == str(server.front.engine.client.core.kv.total_blocks)
    assert sample.labels["block_size"] == str(config.kv.block_size)
    assert sample.labels["cache_dtype"] == "float32"
    assert sample.labels["enable_prefix_caching"] == "True"


def test_hits_of_the_prefix_cache_are_tokens(server, complete):
    prompt = "The clock in the station is wrong by seven minutes. " * 4
    complete(prompt)
    before = read(server)
    usage = complete(prompt)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    after = read(server)
    assert cached > 0
    for name in ("prefix_cache_hits", "prompt_tokens_cached"):
        assert value(after, name, f"{name}_total") - value(before, name, f"{name}_total") == cached
    name = "request_prefill_kv_computed_tokens"
    computed = value(after, name, f"{name}_sum") - value(before, name, f"{name}_sum")
    assert computed == usage["prompt_tokens"] - cached


def test_what_requests_ask_for_is_counted(serve):
    server = serve(engine={"max_model_len": 512})
    for body in (
        {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 5, "ignore_eos": True},
        {"prompt": [5, 6, 7], "max_tokens": 100_000, "allowed_token_ids": [9], "stop_token_ids": [9]},
    ):
        assert server.http.post("/v1/completions", json=body).status_code == 200
    families = read(server)

    def grown(name):
        return tuple(value(families, name, f"{name}_{part}") for part in ("count", "sum"))

    assert grown("request_params_n") == (3, 2 + 2 + 1)
    limit = server.front.max_model_len - 3  # what is left for the answer counts, as in vLLM
    assert grown("request_params_max_tokens") == (3, 5 + 5 + limit)
    count, longest = grown("request_max_num_generation_tokens")
    assert count == 3
    assert grown("request_generation_tokens")[1] - longest == 5 + 5  # the second continuations
    assert grown("request_num_preemptions") == (3, 0)


def test_preemptions_are_counted_by_request(serve):
    server = serve(engine={"num_blocks": 12, "block_size": 8, "enable_prefix_caching": False})
    prompts = [[number, *range(30, 50)] for number in range(5, 9)]
    body = {"prompt": prompts, "max_tokens": 40, "ignore_eos": True}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    families = read(server)
    total = value(families, "num_preemptions", "num_preemptions_total")
    name = "request_num_preemptions"
    assert total > 0
    assert value(families, name, f"{name}_sum") == total
    assert 1 <= value(families, name, f"{name}_bucket", le="0.0") <= 3


def test_who_waits_is_shown_by_reason():
    page = (
        ServerMetrics("small").render(EngineMetrics(num_waiting=5, num_deferred=2), EngineConfig()).decode()
    )
    families = {family.name: family for family in text_string_to_metric_families(page)}
    name = "num_requests_waiting_by_reason"
    assert {reason: value(families, name, name, reason=reason) for reason in ("capacity", "deferred")} == {
        "capacity": 3,
        "deferred": 2,
    }


def test_a_request_that_its_client_gave_up_is_in_no_histogram_of_whole_requests(scripted, until):
    server = scripted(*["a"] * 100_000)
    with server.http.stream("POST", "/v1/completions", json={"prompt": [1], "stream": True}) as answer:
        next(answer.iter_lines())
    name = "request_success"
    until(lambda: value(read(server), name, f"{name}_total", finished_reason="abort") == 1)
    families = read(server)
    counted = {each for each in HISTOGRAMS if value(families, each, f"{each}_count")}
    gaps = {"inter_token_latency_seconds", "time_per_output_token_seconds"}
    assert counted == {"time_to_first_token_seconds"} | gaps


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


def test_an_engine_that_makes_no_progress_is_shown_so_and_not_asked(scripted):
    server = scripted()
    server.front.num_restarts = 2
    families = read(server)
    assert value(families, "engine_up", "engine_up") == 1
    assert value(families, "engine_restarts", "engine_restarts_total") == 2
    server.front.is_responsive = False
    asked = []
    server.front.metrics = lambda: asked.append(1)  # would not return
    families = read(server)
    assert not asked
    assert value(families, "engine_up", "engine_up") == 0
    assert value(families, "num_requests_running", "num_requests_running") == 3  # as it was last known
    server.front.num_restarts = 3
    families = read(server)
    assert value(families, "engine_restarts", "engine_restarts_total") == 3
    assert value(families, "num_requests_running", "num_requests_running") == 0


def test_passes_of_the_scheduler_are_counted_by_name_and_added_up():
    passes = [
        PassMetrics(name=name, num_runs=3, num_decisions=number, total_ns=5 * 10**8)
        for name, number in (("one", 1), ("two", 2), ("one", 4))
    ]
    engine = EngineMetrics(modules={"scheduler": SchedulerMetrics(passes=passes)})
    page = ServerMetrics("small").render(engine, EngineConfig()).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    counts = {
        (name, what): value(
            families, f"scheduler_pass_{what}", f"scheduler_pass_{what}_total", **{"pass": name}
        )
        for name in ("one", "two")
        for what in ("runs", "decisions", "seconds")
    }
    assert list(counts.values()) == [6, 5, 1.0, 3, 2, 0.5]


def test_modules_that_failed_are_counted_by_kind():
    modules = {
        "prefix_cache": SimpleNamespace(policy_failure="Moon: RuntimeError"),
        "scheduler_pass": PassFailures(failures={"one": "KeyError", "two": "KeyError"}),
    }
    counts = []
    for engine in (EngineMetrics(), EngineMetrics(modules=modules)):
        page = ServerMetrics("small").render(engine, EngineConfig()).decode()
        families = {family.name: family for family in text_string_to_metric_families(page)}
        counts.append(
            [
                value(families, *["failed_modules"] * 2, kind=kind)
                for kind in ("eviction_policy", "scheduler_pass")
            ]
        )
    assert counts == [[0, 0], [1, 2]]


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
