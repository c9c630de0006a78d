"""The same sessions on servers whose behaviour is known."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from itertools import pairwise

import pytest

from sagellm.core import ConfigError
from sagellm.engines.cli import main
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.metrics.limits import Limits as MachineLimits
from sagellm.engines.worker.work import WorkMetrics
from sagellm.lab.bench import benchmark
from sagellm.lab.bench.benchmark import (
    BenchmarkSettings,
    headline,
    measurement_errors,
    run_benchmark,
)
from sagellm.lab.bench.chrome_trace import write_chrome_trace
from sagellm.lab.bench.contenders import Contender, PeerSpec, peer_server, vllm_arguments
from sagellm.lab.bench.contest import Contest
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.readings import Reading, ServerReader, kv_use, page_values
from sagellm.lab.bench.results import request_rows
from sagellm.lab.bench.sessions import Phase
from sagellm.lab.bench.workloads import WorkloadSettings

SMALL = WorkloadSettings(name="mixed", max_len=400, vocab_size=100)


def apply(server, **phase):
    contest = Contest(SMALL)
    return contest.run(Contender(name="fake", url=server.url), Phase(**phase))


def test_callers_send_one_turn_after_the_other(timed_server, behaviour):
    server = timed_server(behaviour(first_s=0.01, num_cached=5))
    figures, run = apply(server, duration_s=0.3, concurrency=3)
    assert server.max_running == 3
    assert figures.load.num_failed == 0
    assert len(run.records) == figures.load.num_requests == 3 * 30
    ends: dict[int, int] = {}
    for record, (session, _) in zip(run.records, run.sent, strict=True):
        assert record.arrival_ns >= ends.get(id(session), 0)
        ends[id(session)] = record.end_ns


def test_hit_rates_stand_beside_the_ideal(timed_server, behaviour):
    server = timed_server(behaviour(first_s=0.01, num_cached=5))
    figures, run = apply(server, duration_s=0.3, concurrency=2)
    num_prompt = sum(len(turn.token_ids) for _, turn in run.sent)
    assert figures.token_hit_rate == pytest.approx(5 * len(run.sent) / num_prompt)
    assert 0 < figures.ideal_hit_rate < 1
    assert figures.share_of_ideal == pytest.approx(figures.token_hit_rate / figures.ideal_hit_rate)
    assert figures.token_saving is None  # only our own engine says what it computed


def test_urgent_requests_are_named_as_vllm_does_and_counted_apart(timed_server, behaviour):
    server = timed_server(behaviour(first_s=0.01))
    figures, run = apply(server, duration_s=0.4, concurrency=4)
    sent = server.bodies[2:]  # behind the warm-up
    priorities = sorted(body.get("priority", 0) for body in sent)
    assert priorities == sorted(-session.priority for session, _ in run.sent)
    assert figures.high_priority.num_requests == priorities.count(-1)
    assert sum(one.num_requests for one in figures.kinds.values()) == len(sent)


@pytest.mark.parametrize(("workload", "priority"), [("mixed", -1), ("document", 0), ("batch", 1)])
def test_urgent_requests_alone_share_no_beginning_and_never_overlap(
    timed_server, behaviour, workload, priority
):
    server = timed_server(behaviour(first_s=0.03))
    contest = Contest(WorkloadSettings(name=workload, max_len=400, vocab_size=100))
    alone = contest.alone(Contender(name="fake", url=server.url))
    assert alone.median == pytest.approx(30)
    sent = server.bodies[2:]  # behind the warm-up
    assert (len(sent), server.max_running) == (alone.count, 1)
    assert {body.get("priority", 0) for body in sent} == {priority}
    assert len({tuple(body["prompt"][:16]) for body in sent}) == len(sent)


def test_sessions_begin_at_the_rate(timed_server, behaviour):
    _, run = apply(timed_server(behaviour(first_s=0.01)), duration_s=5.0, rate=40.0)
    assert len({id(session) for session, _ in run.sent}) == pytest.approx(5 * 40, rel=0.15)


def test_a_server_that_refuses_everything_is_an_error(fake_server, behaviour):
    with pytest.raises(BenchmarkError, match=r"fake: .* http_500"):
        apply(fake_server(behaviour(status=500)), duration_s=0.2, concurrency=1)


def test_all_servers_get_the_rate_that_the_slowest_carries(timed_server, behaviour):
    ours, peer = timed_server(behaviour(first_s=0.01)), timed_server(behaviour(first_s=0.05))
    settings = BenchmarkSettings(
        duration=0.5,
        concurrency=2,
        max_len=400,
        base_url=ours.url,
        peers=(PeerSpec(name="vllm", url=peer.url),),
    )
    done = run_benchmark(EngineConfig(), settings)
    slowest = min(one.load.request_throughput_per_s for one in done.figures["saturated"].values())
    assert slowest == pytest.approx(2 / 0.05)
    assert done.rates == {"steady": pytest.approx(0.6 * slowest)}
    rows = headline(done)
    assert rows["alone.high_priority_ttft_median_ms"] == pytest.approx({"sagellm": 10, "vllm": 50})
    assert rows["saturated.output_throughput_tokens_per_s"].keys() == {"sagellm", "vllm"}
    assert rows["steady.ideal_hit_rate"]["vllm"] > 0


class GrowingWork(ServerReader):
    """Says that 10^15 more FLOPs were done each time that it is asked: more than any machine does."""

    def __init__(self):
        self.work = WorkMetrics()

    def read(self):
        work = self.work
        self.work = WorkMetrics(flops=work.flops + 10**15, read_bytes=work.read_bytes + 1, num_tokens=9)
        return Reading(work=work)

    def close(self):
        pass


@pytest.fixture
def own_engine(fake_server, monkeypatch):
    """An engine that `run_benchmark` takes for the one that it started; it resolved "auto" to bfloat16."""
    url, resolved = fake_server().url, EngineConfig().with_values({"model.dtype": "bfloat16"})

    @contextmanager
    def own_server(config):
        assert config.model.dtype == "auto"
        yield Contender(name="sagellm", url=url)

    monkeypatch.setattr(benchmark, "own_server", own_server)
    monkeypatch.setattr(benchmark._Fit, "of", lambda _: benchmark._Fit(config=resolved))
    monkeypatch.setattr("sagellm.lab.bench.contest.reader_of", lambda _: GrowingWork())
    return url


def test_the_machine_is_measured_for_what_the_engine_resolved_and_not_for_auto(own_engine):
    measured = []

    def measure(config):
        measured.append(config.model.dtype)
        return MachineLimits(peak_flops_per_s=1e30, read_bandwidth_bytes_per_s=1e10, peak_source="a test's")

    settings = BenchmarkSettings(duration=0.2, rate=30.0, max_len=400, vocab_size=100)
    done = run_benchmark(EngineConfig(), settings, measure=measure)
    assert measured == ["bfloat16"]
    figures = done.figures["steady"]["sagellm"]
    assert figures.limits.mfu == pytest.approx(figures.work.flops / (figures.load.duration_s * 1e30))
    assert headline(done)["steady.mfu"] == {"sagellm": figures.limits.mfu}
    assert measurement_errors(done.figures) == []


def test_without_an_engine_of_ours_no_machine_is_measured(fake_server):
    settings = BenchmarkSettings(duration=0.2, rate=30.0, max_len=400, base_url=fake_server().url)
    done = run_benchmark(EngineConfig(), settings, measure=lambda config: 1 / 0)
    assert done.machine is None
    assert done.figures["steady"]["sagellm"].limits is None


def test_an_mfu_above_1_is_told_as_an_error_and_not_cut(own_engine, monkeypatch, capsys):
    limits = MachineLimits(peak_flops_per_s=1e12, read_bandwidth_bytes_per_s=1e10, peak_source="a test's")
    monkeypatch.setattr("sagellm.engines.metrics.limits.engine_limits", lambda config: limits)
    load = ("--duration", "0.2", "--rate", "30", "--max-len", "400", "--vocab-size", "100")
    with pytest.raises(SystemExit, match="0"):
        main(["llm", "benchmark", *load, "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["figures"]["steady.mfu"]["sagellm"] > 1
    assert shown["measurement_errors"][0].startswith("steady, sagellm: an MFU of ")
    assert "cannot be true" in shown["phases"]["steady"]["sagellm"]["limits"]["mfu_error"]
    with pytest.raises(SystemExit, match="0"):
        main(["llm", "benchmark", *load])
    assert "error: steady, sagellm: an MFU of " in capsys.readouterr().err


def test_with_a_rate_there_is_one_phase(timed_server, behaviour):
    url = timed_server(behaviour(first_s=0.01)).url
    settings = BenchmarkSettings(duration=0.3, rate=30.0, max_len=400, base_url=url)
    assert list(run_benchmark(EngineConfig(), settings).figures) == ["steady"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm=http://h:1/v1", PeerSpec(name="vllm", url="http://h:1/v1")),
        (
            "vllm=/env/bin/python --enforce-eager",
            PeerSpec(name="vllm", command=("/env/bin/python", "--enforce-eager")),
        ),
    ],
)
def test_a_peer_is_a_url_or_an_interpreter(text, expected):
    assert PeerSpec.parse(text) == expected


@pytest.mark.parametrize("text", ["vllm", "vllm=", "=x", "sglang=/env/bin/python"])
def test_what_names_no_peer_is_refused(text):
    with pytest.raises(ConfigError, match="--peer"):
        PeerSpec.parse(text)


def test_a_peer_that_cannot_start_shows_its_log(checkpoint):
    config = EngineConfig.from_flat(model=str(checkpoint))
    peer = PeerSpec(name="vllm", command=(sys.executable,))
    with (
        pytest.raises(BenchmarkError, match=r"ended before it was ready:\n.*vllm"),
        peer_server(peer, config),
    ):
        pass


def test_vllm_gets_the_same_limits_and_as_much_kv(checkpoint):
    config = EngineConfig.from_flat(
        model=str(checkpoint),
        max_num_seqs=7,
        max_model_len=512,
        enable_prefix_caching=False,
        dtype="bfloat16",
    )
    arguments = vllm_arguments(config, 1280)
    assert {"--max-num-seqs=7", "--max-model-len=512", "--dtype=bfloat16"} <= set(arguments)
    assert {"--no-enable-prefix-caching", "--num-gpu-blocks-override=10", "--block-size=128"} <= set(
        arguments
    )
    unlimited = EngineConfig.from_flat(model=str(checkpoint))
    assert "--max-model-len=900" in vllm_arguments(unlimited, 1280, longest=900)
    assert not any("--max-model-len" in one for one in vllm_arguments(unlimited))


def test_a_peer_that_fails_shows_the_error_it_began_with(checkpoint, tmp_path):
    failing = tmp_path / "python"
    failing.write_text(
        "#!/bin/sh\necho 'ValueError: the cause' >&2\nseq 40\necho 'RuntimeError: what follows' >&2\nexit 1\n"
    )
    failing.chmod(0o755)
    peer = PeerSpec(name="vllm", command=(str(failing),))
    with (
        pytest.raises(BenchmarkError, match=r"ValueError: the cause\n(.|\n)*RuntimeError: what follows"),
        peer_server(peer, EngineConfig.from_flat(model=str(checkpoint))),
    ):
        pass


def test_kv_use_counts_pressure_from_the_first_eviction():
    readings = [
        Reading(held_share=0.1, live_share=0.1, num_looked_up_tokens=10, num_hit_tokens=1),
        Reading(held_share=0.5, live_share=0.3, num_evicted_blocks=0),
        Reading(held_share=0.9, live_share=0.5, num_evicted_blocks=1),
        Reading(
            held_share=1.0, live_share=0.4, num_evicted_blocks=1, num_looked_up_tokens=30, num_hit_tokens=6
        ),
    ]
    use = kv_use(readings)
    assert use.held_share_under_pressure == pytest.approx(0.95)
    assert (use.held_share, use.live_share) == (pytest.approx(0.8), pytest.approx(0.4))
    assert use.prefix_hit_rate == 0.25


def test_a_page_of_metrics_is_read_by_the_names_behind_the_prefix():
    page = (
        "# HELP vllm:kv_cache_usage_perc share\n"
        'vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25\n'
        'vllm:prefix_cache_hits_total{engine="0"} 3.0\nvllm:prefix_cache_hits_total{engine="1"} 4.0\n'
        "vllm:num_requests_waiting 2\npython_info 1.0\n"
    )
    assert page_values(page) == {
        "kv_cache_usage_perc": 0.25, "prefix_cache_hits_total": 7.0, "num_requests_waiting": 2.0,
    }  # fmt: skip


def test_requests_that_overlap_take_places_of_their_own_in_the_trace(timed_server, behaviour, tmp_path):
    _, run = apply(timed_server(behaviour(first_s=0.02)), duration_s=0.2, concurrency=2)
    write_chrome_trace(tmp_path / "t.json", {"fake": request_rows(run)})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "request"]
    assert len(spans) == len(run.records)
    assert {event["tid"] for event in spans} == {1, 2}
    for place in (1, 2):
        times = sorted((one["ts"], one["ts"] + one["dur"]) for one in spans if one["tid"] == place)
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
