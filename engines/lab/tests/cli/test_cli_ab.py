"""`ab`: a table, verdicts, JSON, a report, bounds, and clear errors; runs are processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from random import Random

import psutil
import pytest

from sagellm.core import TraceRequest
from sagellm.engines.config.schema import EngineConfig
from sagellm.lab.ab.processes import run_jobs
from sagellm.lab.ab.run import Job, main
from sagellm.lab.ab.study import Source, make_plan
from sagellm.lab.ab.variants import read_variant
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.cli.ab import complete_variant
from sagellm.lab.traces import read_trace, write_trace
from sagellm.testing.patience import PATIENCE_S, wait_until

COSTS = {
    "source": "by hand",
    "device": "cuda",
    "step": {"base_ns": 1_000_000, "token_ns": 10_000},
    "kv_bytes_per_token": 1000,
    "kv_memory_bytes": 1_600_000,
}
OTHER_LRU = """
from sagellm.core import Provider, hookimpl

@hookimpl
def sagellm_providers():
    target = "sagellm.kvmgr.eviction:FIFOEvictionPolicy"
    return [Provider("eviction_policy", "moon", target, "by another name")]
"""

LOUD_FIFO = """
import os, sys
from sagellm.core import Provider, hookimpl
from sagellm.kvmgr.eviction import FIFOEvictionPolicy

class Loud(FIFOEvictionPolicy):
    def on_insert(self, node):
        print("inserted")
        os.write(1, b"inserted")
        sys.stderr.write(1000 * "said at length\\n")
        super().on_insert(node)

@hookimpl
def sagellm_providers():
    return [Provider("eviction_policy", "loud", "loud_plugin:Loud", "speaks")]
"""


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return path


@pytest.fixture
def trace(tmp_path):
    """Return conversations of two turns behind three beginnings, faster than one seat serves them."""
    random, requests = Random(1), []
    for index in range(24):
        path = [random.randrange(3), 100 + index]
        for turn in range(2):
            path = [*path, 200 + 2 * index + turn]
            requests.append(
                TraceRequest(
                    0.002 * index + 0.05 * turn, 16 * len(path), 20 + index % 5, tuple(path), 16,
                    conversation=str(index),
                )
            )  # fmt: skip
    path = tmp_path / "trace.jsonl"
    write_trace(path, sorted(requests, key=lambda one: one.arrival_s))
    return path


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.jsonl"
    write_trace(path, [TraceRequest(0.001 * i, 50 + i, 3) for i in range(20)])
    return path


class Page(HTMLParser):
    """Checks that what is opened is closed, and collects what is loaded."""

    VOID = ("meta", "wbr", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_serving_is_compared_with_bounds_beside(trace, costs, sage):
    done = sage(
        "llm", "ab", trace, "--cost", costs, "--max-num-seqs", "2", "--b", "order=none,share=none",
        "--c", "scheduler.max_num_seqs=4", "--json",
    )  # fmt: skip
    found = done.json
    assert [(run["name"], run["variant"]) for run in found["runs"]] == [
        ("a", "default"), ("b", "order=none,share=none"), ("c", "scheduler.max_num_seqs=4"),
    ]  # fmt: skip
    bounds = [run["name"] for run in found["bounds"]]
    assert bounds == [
        "exact lengths", "in order of arrival", "optimal eviction, cache alone", "no eviction, cache alone",
    ]  # fmt: skip
    assert (found["headline"], found["num_sessions"], found["interval"]["block_sessions"]) == ("ttft", 24, 2)
    assert found["interval"]["level_of_each"] == pytest.approx(0.975)
    in_order, more_seats = found["comparisons"]
    arrival = found["bounds"][1]
    assert found["runs"][1]["ttft"] == arrival["ttft"], "b is that bound"
    assert "ttft" in in_order["changes"]
    assert more_seats["verdict"].startswith("c is ")
    assert " faster in mean TTFT" in more_seats["verdict"]
    relative = more_seats["changes"]["ttft"]["relative"]
    assert relative["low"] < relative["value"] < relative["high"] < 0


def test_the_cache_alone_is_compared_without_costs(trace, sage):
    variants = ("--a", "eviction=lru", "--b", "prefix_cache.enabled=false")
    out = sage("llm", "ab", trace, "--num-blocks", "12", *variants).out
    lines = out.splitlines()
    assert lines[0] == "48 requests in 24 sessions, 12 blocks of 16 tokens; the prefix cache alone"
    assert lines[1].startswith("4 runs in ")
    assert lines[3].split() == ["RUN", "PROMPT", "TOKENS", "SAVED"]
    saved = [float(line.split()[-2]) for line in lines[4:8]]
    assert saved[1] == 0 < saved[0] < saved[2] < saved[3], "LRU, the optimum, and a cache that never evicts"
    assert lines[6].startswith("optimal eviction (Belady's policy)")
    assert f" points fewer prompt tokens saved: 0.0 % instead of {saved[0]} % (95 %: " in lines[9]


def test_the_same_configuration_is_run_and_said(trace, costs, sage):
    found = sage(
        "llm", "ab", trace, "--cost", costs, "--no-bounds", "--b", "eviction=reuse", "--c",
        "scheduler.max_num_seqs=512", "--json",
    ).json  # fmt: skip
    assert found["bounds"] == []
    same, other = found["comparisons"]
    assert same["verdict"] == "b has the same configuration as a: every request came out the same"
    assert other["verdict"].startswith("c is identical to a: every request came out the same; ")
    assert (same["is_identical"], other["is_same_configuration"]) == (True, False)


def test_what_decides_nothing_in_the_cache_alone_is_said(trace, sage):
    arguments = ("--num-blocks", "12", "--b", "order=none,share=none", "--no-bounds", "--json")
    [found] = sage("llm", "ab", trace, *arguments).json["comparisons"]
    assert "without --cost only the cache is replayed: order, share, " in found["verdict"]


def test_a_policy_that_a_variant_has_without_naming_it_is_said(trace, sage):
    arguments = ("llm", "ab", trace, "--num-blocks", "12", "--no-bounds")
    said = sage(*arguments, "--a", "eviction=lru", "--b", "order=none", "--c", "eviction=lru,order=none").out
    assert "b has eviction=reuse without naming it; a has another" in said
    assert "c has" not in said
    said = sage(*arguments, "--a", "eviction=lru", "--b", "prefix_cache.eviction_policy=s3fifo").out
    assert "without naming" not in said


def test_who_has_more_memory_is_said(trace, sage):
    out = sage("llm", "ab", trace, "--num-blocks", "12", "--b", "kv.block_size=32", "--no-bounds").out
    assert "b has KV for 384 tokens, a for 192\n" in out


def test_more_blocks_than_a_simulation_has_are_refused(trace, sage):
    done = sage("llm", "ab", trace, "--num-blocks", "999999999999", "--b", "eviction=lru")
    assert (done.code, "a: kv.num_blocks is 999,999,999,999; at most 16,777,216" in done.err) == (2, True)


def test_blocks_that_nobody_named_are_said_to_be_those_of_the_costs(trace, costs, sage):
    arguments = ("llm", "ab", trace, "--cost", costs, "--b", "order=mlfq", "--no-bounds")
    said = "what the memory in the costs holds; --num-blocks is what your server has"
    assert f", 100 blocks of 16 tokens ({said}); serving" in sage(*arguments).out
    assert said not in sage(*arguments, "--num-blocks", "100").out


def test_what_was_recorded_stands_beside_and_what_is_far_from_it_is_said(trace, costs, sage, tmp_path):
    arguments = ("--cost", costs, "--max-num-seqs", "2", "--b", "order=none", "--no-bounds")
    found = sage("llm", "ab", trace, *arguments, "--json").json
    assert (found["recorded"], found["is_as_recorded"]) == ({}, True)
    simulated = found["runs"][0]
    report, near, far = (tmp_path / name for name in ("report.html", "near.jsonl", "far.jsonl"))
    for path, times in ((near, 1.2), (far, 2.0)):
        ttft_s = simulated["ttft"] * times
        served = [
            replace(one, ttft_s=ttft_s, num_cached_tokens=round(simulated["saved"] * one.num_prompt_tokens))
            for one in read_trace(trace)
        ]
        write_trace(path, served)
    warning = "a is not what was recorded: are --num-blocks, --cost and the policies those of that server?"
    out = sage("llm", "ab", near, *arguments).out
    assert f"as recorded: mean TTFT {1200 * simulated['ttft']:.1f} ms, prompt tokens saved " in out
    assert warning not in out
    assert warning in sage("llm", "ab", far, *arguments, "--html", report).out
    assert warning in report.read_text(encoding="utf-8")
    assert warning not in sage("llm", "ab", far, *arguments, "--stretch", "0.5").out
    variants = ("--a", "prefix_cache.enabled=false", "--b", "default")
    assert (
        "\na: default (eviction=reuse,order=shortest,share=fair-share,chunk=chunked-prefill,predictor=" in out
    )
    alone = sage("llm", "ab", far, "--num-blocks", "12", *variants, "--json").json
    assert list(alone["recorded"]) == ["saved"]
    assert not alone["is_as_recorded"], "without a cache nothing is saved"


def test_a_run_of_which_all_requests_fail_is_not_compared(trace, costs, sage):
    arguments = ("llm", "ab", trace, "--cost", costs, "--b", "order=none,share=none", "--no-bounds")
    failed = sage(*arguments, "--num-blocks", "2")
    assert failed.code == 1
    assert "Error: a: all 48 requests failed: " in failed.err
    assert "identical" not in failed.out


def test_the_same_command_finds_the_same_in_any_number_of_processes(trace, costs, sage):
    arguments = ("llm", "ab", trace, "--cost", costs, "--b", "order=mlfq", "--no-bounds", "--json")
    assert sage(*arguments, "--jobs", "1").out == sage(*arguments, "--jobs", "2").out


def test_as_many_run_at_once_as_there_are_cores_for_the_process(trace, costs, sage, monkeypatch):
    asked = []

    def refuse(jobs, num_processes, advance):
        asked.append(num_processes)
        raise BenchmarkError("not today")

    monkeypatch.setattr("sagellm.lab.ab.study.run_jobs", refuse)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 4, 7}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for more in ((), ("--jobs", "2")):
        assert "not today" in sage("llm", "ab", trace, "--cost", costs, "--b", "order=mlfq", *more).err
    assert asked == [3, 2]


def test_a_trace_of_lengths_has_no_optimal_eviction(lengths, costs, sage):
    found = sage("llm", "ab", lengths, "--cost", costs, "--b", "order=mlfq", "--json").json
    assert [run["name"] for run in found["bounds"]] == ["exact lengths", "in order of arrival"]
    assert found["without"] == ["no optimal eviction: the trace knows only the lengths of prompts"]
    refused = sage("llm", "ab", lengths, "--num-blocks", "50", "--b", "eviction=lru")
    assert (refused.code, "compare serving with --cost FILE" in refused.err) == (2, True)


def test_the_headline_is_the_metric_that_was_named(trace, costs, sage):
    found = sage(
        "llm", "ab", trace, "--cost", costs, "--no-bounds", "--max-num-seqs", "2", "--b",
        "scheduler.max_num_seqs=6", "--headline", "latency", "--json",
    ).json  # fmt: skip
    assert found["headline"] == "latency"
    assert "mean latency" in found["comparisons"][0]["verdict"]


def test_the_report_is_one_page_that_loads_nothing(trace, costs, sage, tmp_path):
    named = tmp_path / "<script>alert(1)<&.jsonl"
    named.write_bytes(trace.read_bytes())
    report = tmp_path / "report.html"
    arguments = (
        "llm", "ab", named, "--cost", costs, "--max-num-seqs", "2", "--b", "scheduler.max_num_seqs=6",
        "--c", "order=shortest{patience=3}", "--html", report,
    )  # fmt: skip
    out = sage(*arguments).out
    text = report.read_text(encoding="utf-8")
    page = Page(text)
    assert (page.open, page.loaded) == ([], [])
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;&amp;.jsonl" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert page.tags.count("svg") >= 6, "two of differences, two distributions, two over time, and keys"
    load = out.splitlines()[0]
    assert load.startswith("48 requests in 24 sessions, 100 blocks of 16 tokens (what the memory in the ")
    assert load.endswith("; steps cost what is in a file: by hand")
    assert load in text
    verdict = next(line for line in out.splitlines() if line.startswith("b is "))
    assert verdict.replace(" %", "\u00a0%") in text
    assert "<h3>scheduler.max_num_seqs=6</h3>\n<p>b is " in text
    refused = sage(*arguments)
    assert (refused.code, "overwrite it with --overwrite" in refused.err) == (2, True)
    own = sage(*arguments[:-1], named, "--overwrite")
    assert (own.code, "is the file that is read" in own.err) == (2, True)


def test_a_report_of_the_cache_alone_has_its_plots(trace, sage, tmp_path):
    report = tmp_path / "report.html"
    sage("llm", "ab", trace, "--num-blocks", "12", "--b", "eviction=fifo", "--html", report)
    page = Page(report.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.tags.count("figure") == 3


def test_policies_of_plugins_are_compared(trace, sage, install):
    install("moon-plugin", OTHER_LRU)
    found = sage(
        "llm", "ab", trace, "--num-blocks", "12", "--a", "eviction=fifo", "--b", "eviction=moon", "--json"
    )
    assert found.json["comparisons"][0]["is_identical"]


def test_what_a_plugin_prints_does_not_disturb_its_run(trace, install):
    install("loud-plugin", LOUD_FIFO)
    config = {"kv.num_blocks": 12, "kv.block_size": 16}
    loud, quiet = run_jobs(
        [
            Job(
                name=name,
                trace=str(trace),
                config=config | {"prefix_cache.eviction_policy": name},
                mode="cache",
            )
            for name in ("loud", "fifo")
        ],
        2,
        lambda amount: None,
    )
    assert loud == quiet


def test_runs_do_not_print_what_passes_do(trace):
    config = EngineConfig().with_values({"scheduler.print": "ir", "kv.num_blocks": 12})
    source = Source(path=trace, requests=read_trace(trace))
    plan = make_plan(source, [read_variant(name, "default", config) for name in "ab"], None)
    jobs = [each.job for each in (*plan.planned, *plan.bounds)]
    assert {job.config["scheduler.print"] for job in jobs} == {"none"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cost", "COSTS"), "nothing to compare a with; give a variant, such as --b"),
        (("--cost", "COSTS", "--b", "eviciton=lru"), "Did you mean 'eviction'?"),
        (("--cost", "COSTS", "--b", "default", "--headline", "tftt"), "Did you mean 'ttft'?"),
        (("--b", "default", "--num-blocks", "9", "--headline", "ttft"), "simulated with --cost FILE"),
        (("--b", "default", "--num-blocks", "9", "--headline", "x"), "possible are saved"),
        (("--b", "drafts=ngram", "--num-blocks", "9"), "drafts are not simulated"),
        (("--b", "default", "--num-blocks", "9", "--stretch", "2"), "--stretch is for serving"),
        (("--b", "eviction=lru"), "Say so with --num-blocks"),
        (("--cost", "COSTS", "--b", "order=mlfq{x=1}"), "b: scheduler.order: scheduler_pass 'mlfq' has no"),
        (("--cost", "COSTS", "--b", "default", "--stretch", "-1"), ": stretch is -1"),
        (("--cost", "/nowhere.json", "--b", "default"), "cannot be read"),
        (("--cost", "COSTS", "--b", "default", "--html", "/nowhere/a.html"), "does not exist"),
    ],
)
def test_what_is_wrong_is_said(trace, costs, sage, arguments, message):
    given = [costs if each == "COSTS" else each for each in arguments]
    result = sage("llm", "ab", trace, *given)
    assert result.code in (1, 2)
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_process_that_dies_is_named_with_what_it_said(trace, monkeypatch):
    monkeypatch.setattr("sagellm.lab.ab.processes._PROGRAM", "sagellm.lab.ab.nothing")
    job = Job(name="b", trace=str(trace), config={}, mode="cache")
    with pytest.raises(BenchmarkError, match=r"b: its process ended .*\n.*No module named"):
        run_jobs([job], 1, lambda amount: None)


def test_a_run_that_fails_ends_the_others(trace, tmp_path, monkeypatch):
    program = "import json, sys, time\nif json.load(sys.stdin)['name'] == 'b':\n    sys.exit('no luck')\n"
    (tmp_path / "one_that_fails.py").write_text(program + f"time.sleep({PATIENCE_S})\nsys.exit('too late')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sagellm.lab.ab.processes._PROGRAM", "one_that_fails")
    jobs = [Job(name=name, trace=str(trace), config={}, mode="cache") for name in "abc"]
    with pytest.raises(BenchmarkError, match=r"^b: its process ended .*\nno luck$"):
        run_jobs(jobs, 2, lambda amount: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_the_command(costs, tmp_path, number):
    path = tmp_path / "long.jsonl"
    write_trace(path, [TraceRequest(0.001 * i, 50, 200) for i in range(20_000)])
    command = [
        sys.executable,
        "-m",
        "sagellm.engines.cli",
        "llm",
        "ab",
        path,
        "--cost",
        costs,
        "--b",
        "order=mlfq",
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    parent = psutil.Process(running.pid)
    wait_until(lambda: len(parent.children()) == 2, "the runs did not start")
    workers = parent.children()
    running.send_signal(number)
    _, errors = running.communicate(timeout=PATIENCE_S)
    if number == signal.SIGINT:
        assert (running.returncode, errors[-8:]) == (130, "stopped\n")
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(workers, PATIENCE_S)
    assert not alive


def test_a_job_is_run_without_torch(trace, costs):
    code = (
        "import sys; sys.modules['torch'] = None; from sagellm.lab.ab.run import main; "
        "main(sys.stdin, sys.stdout)"
    )
    config = {"kv.num_blocks": 50, "kv.block_size": 16}
    job = {"name": "a", "trace": str(trace), "config": config, "mode": "serving", "cost": str(costs)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(line["done"] for line in lines[:-1]) == 48
    assert len(lines[-1]["result"]["rows"]["ttft_s"]) == 48
    out = StringIO()
    assert main([json.dumps(job | {"mode": "cache", "config": {"kv.block_size": 16}})], out) == 0
    assert "kv.num_blocks is null" in json.loads(out.getvalue().splitlines()[-1])["error"]


def test_the_help_says_that_blocks_have_no_default_without_costs(sage):
    out = " ".join(sage("llm", "ab", "--help").out.split())
    assert "what the memory in the costs holds; none without --cost" in out
    assert "what memory allows" not in out


def test_the_tab_key_completes_variants():
    assert "order=" in complete_variant("or")
    assert complete_variant("order=mlf") == ["order=mlfq"]
    assert complete_variant("order=none,eviction=s3") == ["order=none,eviction=s3fifo"]
    assert complete_variant("order=none,scheduler.max_num_s") == ["order=none,scheduler.max_num_seqs="]
    assert complete_variant("order=mlfq{quan") == ["order=mlfq{quantum="]
