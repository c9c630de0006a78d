"""`bench`: flags in, figures out; a real engine for the two that need one, a stand-in server for `serve`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sagellm.lab.cli.variadic import repeat_options
from sagellm.testing.patience import PATIENCE_S, wait_until

REAL = ("--dtype", "float32", "--device", "cpu", "--num-blocks", "128")
SHORT = ("--input-len", "8", "--output-len", "3")


@pytest.fixture(autouse=True)
def _read_little(monkeypatch):
    """Measure the read bandwidth in a moment: no test looks at the figure."""
    monkeypatch.setattr("sagellm.engines.metrics.limits.READ_BYTES", 1 << 20)


class Handler(BaseHTTPRequestHandler):
    """Streams `max_tokens` words; refuses every prompt that is longer than 100 tokens."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer(200, b'{"data": [{"id": "tiny"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["prompt"]) > 100:
            self.answer(429, b'{"error": {"message": "too much"}}')
            return
        choices = [{"text": " so", "finish_reason": None}] * (body["max_tokens"] - 1)
        events = [{"choices": [one]} for one in [*choices, {"text": " so", "finish_reason": "length"}]]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        lines = [json.dumps(one) for one in [*events, {"choices": [], "usage": usage}]] + ["[DONE]"]
        self.answer(200, "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream")

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # of the default five, the rest of a burst waits for seconds to be sent again


@pytest.fixture
def server():
    made = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def test_serve_prints_figures_and_what_the_client_cost(sage, server):
    result = sage("llm", "bench", "serve", "--base-url", server, "--num-prompts", "4", *SHORT)
    assert result.code == 0, result.err
    assert "output throughput (tokens/s)" in result.out
    assert [name in result.out for name in ("ttft (ms)", "tpot (ms)", "itl (ms)", "e2e (ms)", "P99")] == [
        True
    ] * 5
    assert "client: " in result.err


def test_serve_saves_and_prints_json_without_the_key(sage, server, tmp_path):
    shown = sage(
        *("llm", "bench", "serve", "--base-url", server, "--api-key", "sesame", *SHORT, "--num-prompts", "4"),
        *("--concurrency", "2", "--goodput", "ttft:500", "tpot:50", "--save", "r.json", "--json"),
    ).json
    saved = json.loads((tmp_path / "r.json").read_text())
    assert shown["figures"]["goodput_requests_per_s"] > 0
    assert saved["settings"]["goodput"] == {"ttft_ms": 500.0, "tpot_ms": 50.0, "e2e_ms": None}
    assert (shown["figures"]["num_output_tokens"], len(saved["requests"]["end_ms"])) == (12, 4)
    assert "sesame" not in json.dumps(saved)
    assert saved["figures"] == shown["figures"]


def test_serve_compares_saved_results_and_runs_nothing(sage, server, tmp_path):
    for name, num_prompts in (("a", 2), ("b", 4)):
        run = ("--base-url", server, *SHORT, "--num-prompts", num_prompts, "--save", f"{name}.json")
        assert sage("llm", "bench", "serve", *run).code == 0
    result = sage("llm", "bench", "serve", "--compare", "a.json", "b.json")
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines()[1:]}
    assert rows["num_requests"] == ["2", "4", "2.000"]
    assert "settings.num_prompts: 2 | 4" in result.err
    shown = sage("llm", "bench", "latency", "--compare", "a.json", "b.json", "--json").json
    assert shown["figures"][0] == {"name": "num_requests", "values": [2.0, 4.0], "ratios": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("command", "flag"),
    [("serve", "--plot"), ("serve", "--save"), ("throughput", "--save"), ("latency", "--save")],
)
def test_a_comparison_refuses_to_write_a_result(sage, tmp_path, command, flag):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"figures": {"num_requests": 2}}')
    result = sage("llm", "bench", command, "--compare", "a.json", "b.json", flag, "out.png")
    assert (result.code, result.out, (tmp_path / "out.png").exists()) == (2, "", False)
    assert f"{flag} out.png is given with --compare, which measures nothing" in result.err


def test_serve_tells_what_failed(sage, server):
    lengths = ("--input-len", "uniform:1:200", "--output-len", "3", "--warmup", "0")
    result = sage("llm", "bench", "serve", "--base-url", server, *lengths, "--num-prompts", "40")
    assert result.code == 0
    assert "× http_429: too much" in result.err
    assert "requests failed" in result.err
    result = sage("llm", "bench", "serve", "--base-url", server, "--input-len", "200", "--warmup", "0")
    assert (result.code, "all 100 requests failed; http_429: too much" in result.err) == (1, True)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--endpoint", "chats"), 2, "--endpoint is 'chats'; it must be completions or chat"),
        (("--input-len", "unifrom:1:2"), 2, "Did you mean 'uniform'?"),
        (("--goodput", "ttf:5"), 2, "Did you mean 'ttft'?"),
        (("--goodput", "ttft"), 2, "write ttft:500"),
        (("--extra-body", "x"), 2, "must be a JSON object"),
        (("--base-url", "ftp://x"), 2, "base_url is 'ftp://x'"),
        (("--base-url", "http://127.0.0.1:9"), 1, "no server answers at http://127.0.0.1:9/v1"),
        (("--trace", "/absent.csv", "--rate", "2"), 2, "--trace-speed instead of --rate"),
        (("--save", "absent/r.json"), 2, "absent does not exist"),
        (("--compare", "a.json"), 2, "a.json cannot be read"),
        (("--rate", "fast"), 2, "Invalid value for '--rate'"),
    ],
)
def test_wrong_flags_of_serve_are_told(sage, flags, code, message):
    result = sage("llm", "bench", "serve", *flags)
    assert (result.code, message in result.err, "Traceback" in result.err) == (code, True, False), result.err


def test_a_wrong_model_is_told(sage, server):
    result = sage("llm", "bench", "serve", "--base-url", server, "--model", "tinny")
    assert (result.code, "serves 'tiny', not 'tinny'" in result.err) == (2, True)


def test_a_plot_needs_matplotlib_and_says_so(sage, server, tmp_path, monkeypatch):
    monkeypatch.setattr("sagellm.lab.plots.find_spec", lambda name: None)
    result = sage("llm", "bench", "serve", "--base-url", server, "--plot", "p.png")
    assert (result.code, "sagellm-lab[plot]" in result.err) == (2, True)


def test_a_plot_is_drawn(sage, server, tmp_path):
    run = ("--base-url", server, *SHORT, "--num-prompts", "3", "--plot", "p.png")
    assert sage("llm", "bench", "serve", *run).code == 0
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_throughput_of_a_small_model(sage, checkpoint, tmp_path):
    run = ("--model", checkpoint, *REAL, *SHORT, "--num-prompts", "3", "--seed", "4", "--save", "t.json")
    result = sage("llm", "bench", "throughput", *run, "--json")
    assert result.code == 0, result.err
    assert (result.json["figures"]["num_output_tokens"], result.json["settings"]["seed"]) == (9, 4)
    assert result.json["engine"]["start_s"] > 0
    assert result.json["machine"]["torch_threads"] >= 1
    assert json.loads((tmp_path / "t.json").read_text()) == result.json


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_a_profile_is_part_of_the_result_without_what_warmed_up(sage, checkpoint, command):
    run = (
        "--model",
        checkpoint,
        *REAL,
        "--input-len",
        "12",
        "--output-len",
        "3",
        "--warmup",
        "2",
        "--profile",
    )
    size = ("--num-prompts", "3") if command == "throughput" else ("--batch-size", "3", "--repeats", "1")
    result = sage("llm", "bench", command, *run, *size, "--json")
    assert result.code == 0, result.err
    decode, prefill = result.json["profile"]["steps"]
    assert (decode["kind"], decode["num_steps"], decode["num_tokens"]) == ("decode", 2, 3)
    assert (prefill["kind"], prefill["num_steps"], prefill["num_tokens"]) == ("prefill", 1, 36)
    assert result.err.count("OPERATION") == 2


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_the_null_engine_is_measured(sage, checkpoint, command):
    run = ("--model", checkpoint, "--engine-kind", "null", *SHORT)
    result = sage("llm", "bench", command, *run)
    assert (result.code, "(tokens/s)" in result.out) == (0, command == "throughput"), result.err


def test_latency_of_a_small_model(sage, checkpoint):
    run = ("--model", checkpoint, *REAL, *SHORT, "--batch-size", "2", "--repeats", "3")
    result = sage("llm", "bench", "latency", *run)
    assert result.code == 0, result.err
    assert "latency (ms)" in result.out
    assert re.search(r"^batch size +2$", result.out, re.MULTILINE)


@pytest.mark.full  # loads torch in a process of its own
def test_startup_of_a_small_model(sage, checkpoint):
    run = ("--model", checkpoint, *REAL, "--warmup", "0", "--repeats", "1")
    result = sage("llm", "bench", "startup", *run, "--json")
    assert result.code == 0, result.err
    figures = result.json["figures"]
    assert (
        0
        < figures["import_ms"]["median"]
        < figures["ready_ms"]["median"]
        < figures["first_token_ms"]["median"]
    )
    assert figures["peak_rss_mib"] > figures["weight_mib"] > 0


@pytest.mark.full
def test_a_start_that_fails_says_why(sage, tmp_path):
    result = sage("llm", "bench", "startup", "--model", tmp_path / "absent", "--warmup", "0")
    assert (result.code, "is neither a directory nor a hub id" in result.err) == (1, True), result.err


def test_the_source_spellings_of_benchmark_are_ours():
    from sagellm.lab.cli.bench.peers import _in_our_words

    given = {"enable_prefix_cache": True, "enable_predictive_eviction": True, "scheduler_ir": "base"}
    ours = {"enable_prefix_caching": True, "eviction_policy": "predictive", "scheduler": "base"}
    assert _in_our_words(given) == ours
    assert _in_our_words({"eviction_policy": "lru", **given})["eviction_policy"] == "lru"


def test_benchmark_loads_a_server_and_keeps_what_it_measured(sage, server, tmp_path):
    result = sage(
        *(
            "llm",
            "bench",
            "peers",
            "--enable-prefix-cache",
            "--enable-predictive-eviction",
            "--scheduler-ir",
            "base",
        ),
        *(
            "--duration",
            "0.4",
            "--workload",
            "chat",
            "--max-len",
            "90",
            "--base-url",
            server,
            "--concurrency",
            "2",
        ),
        *("--save", "b.json", "--chrome-trace", "t.json"),
    )
    assert result.code == 0, result.err
    saved = json.loads((tmp_path / "b.json").read_text())
    assert saved["settings"]["engine"]["prefix_cache.eviction_policy"] == "predictive"
    assert 0 <= saved["figures"]["saturated.ideal_hit_rate"]["sagellm"] < 1
    assert "saturated.output throughput (tokens/s)" in result.out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_benchmark_that_is_terminated_ends_the_servers_that_it_started(server, tmp_path):
    peer = tmp_path / "python"
    peer.write_text("#!/bin/sh\necho $$ > starting && mv starting started\nexec sleep 600\n")
    peer.chmod(0o755)
    command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "benchmark", "--base-url", server]
    process = subprocess.Popen([*command, "--peer", f"vllm={peer}"], stderr=subprocess.DEVNULL)
    wait_until((tmp_path / "started").exists)
    process.terminate()
    assert process.wait(PATIENCE_S) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)


def test_the_old_name_of_bench_peers_works_and_is_not_listed(sage, tmp_path):
    (tmp_path / "b.json").write_text('{"figures": {"steady.num_failed": {"sagellm": 2}}}')
    result = sage("llm", "benchmark", "--compare", "b.json", "b.json")
    assert (result.code, "steady.num_failed.sagellm" in result.out) == (0, True), result.err
    assert "benchmark" not in sage("llm", "--help").out.split()
    assert "peers" in sage("llm", "bench", "--help").out.split()


@pytest.mark.full  # starts an engine in processes of its own
def test_benchmark_serves_a_model_itself(sage, checkpoint):
    run = (
        "--model",
        checkpoint,
        *REAL,
        "--workload",
        "chat",
        "--duration",
        "8",
        "--concurrency",
        "2",
        "--json",
    )
    result = sage("llm", "bench", "peers", *run)
    assert result.code == 0, result.err
    row = {name: values["sagellm"] for name, values in result.json["figures"].items()}
    assert row["saturated.num_failed"] == 0
    assert 0 < row["saturated.token_saving"] <= row["saturated.ideal_hit_rate"] + 0.01
    assert row["saturated.peak_rss_mib"] > 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workload", "mixd"), "there are mixed"),
        (("--duration", "0"), "duration is 0"),
        (("--peer", "vllm"), "write NAME=URL"),
        (("--peer", "sagellm=http://x"), "a name of its own"),
    ],
)
def test_wrong_flags_of_benchmark_are_told(sage, flags, message):
    result = sage("llm", "bench", "peers", *flags, "--base-url", "http://127.0.0.1:9")
    assert (result.code, message in result.err, "Traceback" in result.err) == (2, True, False), result.err


def test_serve_takes_a_named_load_and_writes_a_trace(sage, server, tmp_path):
    load = ("--workload", "sharegpt", "--max-len", "90", "--num-prompts", "6", "--rate", "50")
    run = sage("llm", "bench", "serve", "--base-url", server, *load, "--chrome-trace", "t.json", "--json")
    assert (run.code, run.json["figures"]["num_requests"]) == (0, 6), run.err
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 1 + 2 * 6


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_lengths_must_be_sensible(sage, command):
    result = sage("llm", "bench", command, "--output-len", "0")
    assert (result.code, "not a distribution of lengths" in result.err) == (2, True), result.err


def test_without_a_model_the_embedded_one_is_measured_and_named(sage):
    result = sage(
        "llm", "bench", "latency", *SHORT, "--num-blocks", "64", "--device", "cpu", "--repeats", "2"
    )
    assert (result.code, "embedded model" in result.err) == (0, True), result.err


@pytest.mark.parametrize("command", ["serve", "throughput", "latency", "startup"])
def test_help_and_the_client_load_no_engine(command):
    source = (
        "import sys\nfrom sagellm.engines.cli import main\n"
        f"try:\n    main(['llm', 'bench', {command!r}, '--help'])\nexcept SystemExit:\n    pass\n"
        "import sagellm.lab.bench.serve\n"
        "print([name for name in ('torch', 'numpy', 'httpx', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_options_take_all_values_that_follow():
    given = ["--goodput", "a", "b", "--json", "--compare", "x", "--rate", "2"]
    assert list(repeat_options(given, ("--goodput", "--compare"))) == [
        *("--goodput", "a", "--goodput", "b", "--json", "--compare", "x", "--rate", "2")
    ]


@pytest.mark.parametrize(("given", "rate"), [("40", 40.0), ("inf", None)])
def test_rates_are_written_as_in_vllm_too(sage, server, given, rate):
    load = ("--base-url", server, *SHORT, "--num-prompts", "2", "--request-rate", given)
    result = sage("llm", "bench", "serve", *load, "--json")
    assert (result.code, result.json["settings"]["rate"]) == (0, rate), result.err
