"""`… stats`: figures of the modules of an engine that runs, read over its socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sagellm.core import EngineDeadError, Namespace
from sagellm.engines import SamplingParams
from sagellm.kvmgr.scheduler_ir.passes import FairSharePass
from sagellm.server.cli.figures import figures_table, label, tenants_table, write, write_duration
from sagellm.server.remote import AdminClient
from sagellm.testing.patience import PATIENCE_S

PROMPTS = [[5, 6, 7] * 8, [5, 6, 7] * 8 + [9], [3, 4]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def engine(make_engine, run_engine):
    engine = make_engine(num_blocks=64, block_size=8, max_num_seqs=1)
    engine.generate(PROMPTS, GREEDY)
    run_engine(engine)
    return engine


def test_the_cache_says_what_it_saved(engine, sage):
    shown = sage("llm", "cache", "stats", "--json").json
    metrics = engine.metrics().modules["prefix_cache"]
    assert shown["provider"] == "radix"
    assert shown["num_tokens_saved"] == metrics.num_hit_tokens == 24
    assert (shown["num_lookups"], shown["num_hits"], shown["num_misses"]) == (3, 1, 2)
    assert shown["token_hit_rate"] == pytest.approx(24 / (24 + 25 + 2))
    assert shown["num_nodes"] == metrics.num_nodes
    figures = sage("llm", "cache", "stats").out.split("\n\n")[1]
    rows = dict(line.split("  ", 1) for line in figures.splitlines()[1:])
    assert {name: rows[name].strip() for name in ("hits", "misses", "tokens saved", "token hit rate")} == {
        "hits": "1",
        "misses": "2",
        "tokens saved": "24",
        "token hit rate": "47.1%",
    }


def test_tenants_have_a_table_of_their_own(make_engine, run_engine, sage):
    cache = "radix{tenant_quotas={a: 1}, reuses_partial_blocks=false}"
    engine = make_engine(num_blocks=64, block_size=8, prefix_cache=cache)
    for tenant in ("a", "b", "b"):
        engine.generate([5, 6, 7] * 8, GREEDY, namespace=Namespace(tenant))
    run_engine(engine)
    lines = [line.split() for line in sage("llm", "cache", "stats").out.splitlines()]
    head = lines.index(
        ["TENANT", "FULL", "BLOCKS", "PARTIAL", "QUOTA", "HITS", "TOKENS", "SAVED", "EVICTED", "BLOCKS"]
    )
    assert lines[head - 1 :] == [
        [],
        lines[head],
        ["b", "3", "0", "-", "1", "16", "0"],
        ["a", "1", "0", "1", "0", "0", "0"],
    ]
    assert not any(line[:1] == ["tenants"] for line in lines)
    tenants = sage("llm", "cache", "stats", "--json").json["tenants"]
    assert (tenants["a"]["max_blocks"], tenants["b"]["num_lookup_tokens"]) == (1, 48)


def test_the_blocks_of_all_tenants_are_those_of_the_cache(make_engine, run_engine, sage):
    engine = make_engine(num_blocks=64, block_size=8)
    for tenant in ("a", "b", "b"):
        engine.generate([5, 6, 7] * 8, GREEDY, namespace=Namespace(tenant))
    run_engine(engine)
    shown = sage("llm", "cache", "stats", "--json").json
    rows = shown["tenants"].values()
    assert sum(row["num_partial_blocks"] for row in rows) == shown["num_partial_blocks"] > 0
    num_full = sum(row["num_blocks"] for row in rows)
    assert num_full + shown["num_partial_blocks"] == shown["num_blocks"]


def test_of_many_tenants_the_largest_are_shown():
    usage = {
        "num_partial_blocks": 0,
        "max_blocks": None,
        "num_hits": 0,
        "num_hit_tokens": 0,
        "num_evicted_blocks": 0,
    }
    lines = tenants_table({f"t{n}": usage | {"num_blocks": n} for n in range(23)}).splitlines()
    assert [line.split()[0] for line in lines[1:21]] == [f"t{n}" for n in range(22, 2, -1)]
    assert lines[21:] == ["and 3 more, which --json has"]


@pytest.mark.parametrize(
    "command",
    [
        *([each, "stats"] for each in ("cache", "pool", "eviction", "scheduler", "predictor", "comm")),
        *(["cache", name] for name in ("pins", "clear")),
        ["pool", "compact"],
    ],
    ids=" ".join,
)
def test_an_engine_is_named_in_both_forms(engine, sage, command):
    for form in (["one"], ["--engine", "one"], ["one", "--engine", "one"]):
        assert sage("llm", *command, *form, "--json").code == 0
    assert "no engine 'two' is running" in sage("llm", *command, "two").err
    assert "one and --engine two; name one" in sage("llm", *command, "one", "--engine", "two").err


def test_the_pool_counts_its_blocks(engine, sage):
    shown = sage("llm", "pool", "stats", "--json").json
    assert (shown["provider"], shown["total_blocks"]) == ("paged", 64)
    assert shown["num_used_blocks"] + shown["num_free_blocks"] == 64
    assert shown["used_share"] == shown["num_used_blocks"] / 64
    assert "external fragmentation" in sage("llm", "pool", "stats").out


@pytest.mark.parametrize(
    ("name", "provider", "figures"),
    [
        ("eviction", "reuse", {"num_inserted", "num_hits", "num_victims", "num_candidates"}),
        ("scheduler", "base", {"num_steps", "num_admitted", "num_running", "mean_tokens_of_busy_steps"}),
        ("scheduler", "base", {"batching_efficiency", "model_gflops_per_s", "read_gbytes_per_s"}),
        ("predictor", "statistical", {"num_predictions", "num_scored", "num_cut"}),
    ],
)
def test_other_modules_say_what_they_count(engine, sage, name, provider, figures):
    shown = sage("llm", name, "stats", "--json").json
    assert shown["provider"] == provider
    assert figures <= shown.keys()
    text = sage("llm", name, "stats").out
    assert (" of engine one\n\nFIGURE" in text, provider in text) == (True, True)


def test_the_failure_of_an_eviction_policy_is_shown(make_engine, run_engine, sage, moon):
    engine = make_engine(num_blocks=64, block_size=8, eviction_policy=moon)
    run_engine(engine, steps=False)
    assert sage("llm", "eviction", "stats", "--json").json["failure"] == ""
    assert "failure" not in sage("llm", "eviction", "stats").out
    engine.generate(PROMPTS, GREEDY)
    failure = "Moon: RuntimeError: no moon tonight"
    assert sage("llm", "eviction", "stats", "--json").json["failure"] == failure
    rows = sage("llm", "eviction", "stats").out.splitlines()
    assert rows[-1].split(maxsplit=1) == ["failure", failure]
    shown = sage("llm", "engine", "status")
    assert shown.err == (
        f"one: the least recently used goes first since the eviction policy failed: {failure}\n"
    )
    (status,) = sage("llm", "engine", "status", "--json").json["engines"]
    assert status["eviction_failure"] == failure


def test_the_failure_of_a_scheduler_pass_is_shown(make_engine, run_engine, sage, monkeypatch):
    engine = make_engine(num_blocks=64, block_size=8)
    run_engine(engine, steps=False)
    assert sage("llm", "scheduler", "passes").err == ""
    monkeypatch.setattr(FairSharePass, "run", lambda *_: {}["gone"])
    engine.generate(PROMPTS, GREEDY)
    shown = sage("llm", "scheduler", "passes")
    assert "fair-share failed and was removed; setting passes tries it again: " in shown.err
    assert "KeyError: 'gone'" in shown.err
    assert shown.out.splitlines()[2].split() == ["share", "fair-share", "(failed)"]
    assert "KeyError: 'gone'" in sage("llm", "scheduler", "stats", "--json").json["failed_fair-share"]
    assert (
        "one: the scheduler pass fair-share failed and was removed: " in sage("llm", "engine", "status").err
    )
    (status,) = sage("llm", "engine", "status", "--json").json["engines"]
    assert list(status["pass_failures"]) == ["fair-share"]
    sage("llm", "policy", "set", "passes", "share=none")
    assert sage("llm", "scheduler", "passes").err == ""


def test_without_a_quantizer_that_is_said(engine, sage):
    assert "no quantizer is used" in sage("llm", "accel", "stats").out
    assert sage("llm", "accel", "stats", "--json").json == {"provider": None}


def test_a_quantizer_says_what_remains(make_engine, run_engine, sage):
    run_engine(make_engine(quantization="int8"))
    shown = sage("llm", "accel", "stats", "--json").json
    assert (shown["provider"], shown["num_tensors"] > 0) == ("int8", True)
    assert 0.2 < shown["remaining_share"] < 0.5  # of float32


def test_without_a_sparsifier_that_is_said(engine, sage):
    assert "no weights are pruned; --sparsity 2:4" in sage("llm", "sparsity", "stats").out


def test_a_sparsifier_says_what_it_removed(make_engine, run_engine, sage):
    run_engine(make_engine(sparsity="1:4"))
    shown = sage("llm", "sparsity", "stats", "--json").json
    assert (shown["provider"], shown["removed_share"]) == ("magnitude", 0.75)
    assert shown["num_kept"] * 4 == shown["num_weights"]
    assert 0.05 < shown["removed_squares_share"] < 0.5


def test_the_topology_is_summed_up(engine, sage):
    shown = sage("llm", "comm", "stats", "--json").json
    assert (shown["provider"], shown["memory_bytes"] > 0) == ("local", True)
    assert "cpu cores" in sage("llm", "comm", "stats").out


def test_a_cache_that_is_switched_off_is_the_null_one(make_engine, run_engine, sage):
    run_engine(make_engine(enable_prefix_caching=False))
    assert sage("llm", "cache", "stats", "--json").json["provider"] == "null"


def test_of_two_engines_one_is_named(engine, make_engine, run_engine, sage):
    run_engine(make_engine(num_blocks=32), "two")
    told = sage("llm", "pool", "stats")
    assert (told.code, "choose one with --engine NAME" in told.err) == (1, True)
    assert sage("llm", "pool", "stats", "--engine", "two", "--json").json["total_blocks"] == 32
    assert "Did you mean 'two'?" in sage("llm", "pool", "stats", "--engine", "tow").err


@pytest.mark.parametrize("name", ["cache", "pool", "eviction", "scheduler", "predictor", "accel", "comm"])
def test_without_an_engine_it_is_told_how_to_start_one(sage, run_engine, name):
    result = sage("llm", name, "stats")
    assert (result.code, "sage llm engine start" in result.err) == (1, True)


@pytest.mark.parametrize(
    "arguments", [["cache", "stats", "--watch", "0.1", "--json"], ["pool", "stats", "--watch", "0.1"]]
)
def test_watching_goes_on_until_it_is_interrupted_and_loads_no_torch(engine, arguments):
    source = (
        "import atexit, sys; from sagellm.engines.cli import main_llm;"
        "heavy = lambda: [name for name in ('torch', 'numpy') if name in sys.modules];"
        "atexit.register(lambda: print('heavy:', heavy(), file=sys.stderr));"
        f"main_llm({arguments!r})"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    watching = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    lines = [watching.stdout.readline() for _ in range(40 if "--json" not in arguments else 3)]
    watching.send_signal(signal.SIGINT)
    _, told = watching.communicate(timeout=PATIENCE_S)
    assert (watching.returncode, told.strip()) == (0, "heavy: []")
    if "--json" in arguments:
        assert [json.loads(line)["num_lookups"] for line in lines] == [3, 3, 3]
    else:
        assert lines.count("KV pool of engine one\n") >= 2
        assert "\x1b" not in "".join(lines)


def test_an_engine_that_goes_away_ends_the_watching(engine, sage, monkeypatch):
    def fail(*_):
        raise EngineDeadError("the engine is gone")

    monkeypatch.setattr(time, "sleep", lambda _: monkeypatch.setattr(AdminClient, "call", fail))
    result = sage("llm", "cache", "stats", "--watch", "1", "--json")
    assert (result.code, result.json["num_lookups"], result.err) == (1, 3, "Error: the engine is gone\n")


def test_a_pause_is_positive(sage):
    assert sage("llm", "cache", "stats", "--watch", "-1").code == 2


def test_a_rate_is_not_a_duration():
    assert (label("model_gflops_per_s"), write("model_gflops_per_s", 4.0)) == ("model gflops/s", "4.00")
    assert (label("num_moved_blocks_per_s"), write("num_moved_blocks_per_s", 75)) == ("moved blocks/s", "75")
    assert (label("uptime_s"), write("uptime_s", 75)) == ("uptime", "1 min 15 s")


def test_figures_are_written_in_the_unit_of_their_name():
    assert write("read_ns", 1_500_000) == "1.500 ms"
    assert write("memory_bytes", 3 << 20) == "3 MiB"
    assert write("hit_rate", 0.125) == "12.5%"
    assert write("num_blocks", 12_345) == "12,345"
    assert write("mae_tokens", 1.5) == "1.50"
    assert write("is_on", True) == "True"
    assert [write_duration(each) for each in (3.4, 75, 7_260, 200_000)] == [
        "3 s",
        "1 min 15 s",
        "2 h 1 min",
        "2 d 7 h",
    ]
    assert figures_table({"num_free_blocks": 3, "cpu": None}).splitlines() == [
        "FIGURE       VALUE",
        "free blocks  3",
    ]


def test_speculation_says_what_became_of_drafts(make_engine, run_engine, sage):
    engine = make_engine(speculation="ngram{min_match=1}", adaptive_speculation=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, allowed_token_ids=[11, 12])
    engine.generate(PROMPTS, greedy)
    run_engine(engine)
    found = engine.metrics().modules["speculation"]
    shown = sage("llm", "speculation", "stats", "--json").json
    assert shown["provider"] == "ngram"
    assert shown["num_accepted_tokens"] == found.num_accepted_tokens > 0
    assert shown["acceptance"] == pytest.approx(found.num_accepted_tokens / found.num_draft_tokens)
    assert shown["mean_accepted_length"] == pytest.approx(found.mean_accepted_length)
    assert shown["num_accepted_at_1"] == found.num_accepted_by_place[0]
    assert shown["num_asked"] >= found.num_drafts
    assert "acceptance" in sage("llm", "speculation", "stats").out
    (status,) = sage("llm", "engine", "status", "--json").json["engines"]
    assert status["num_draft_tokens"] == found.num_draft_tokens
    told = sage("llm", "explain").out.partition("drafts: ")[2]
    assert told.split()[1] == "of"


def test_without_drafts_that_is_said(engine, sage):
    assert "sage llm policy set drafts ngram" in sage("llm", "speculation", "stats").out


def test_a_proposer_that_failed_is_shown(make_engine, run_engine, sage):
    engine = make_engine(speculation="ngram", adaptive_speculation=False)
    engine.client.core.scheduler.speculation.proposer.propose = lambda seats, most: 1 // 0
    engine.generate(PROMPTS, GREEDY)
    run_engine(engine)
    assert "ZeroDivisionError" in sage("llm", "speculation", "stats").out
    assert "no drafts any more: ZeroDivisionError" in sage("llm", "engine", "status").err


def test_structured_outputs_are_counted_by_what_they_ask_for(make_engine, run_engine, sage):
    pytest.importorskip("xgrammar")
    engine = make_engine(num_blocks=64, block_size=8)
    for asked in ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}, {"regex": "[ab]"}):
        engine.generate(PROMPTS[0], SamplingParams(max_tokens=4, structured_outputs=asked))
    run_engine(engine)
    shown = sage("llm", "grammar", "stats", "--json").json
    assert (shown["provider"], shown["num_choice_requests"], shown["num_regex_requests"]) == (
        "xgrammar",
        2,
        1,
    )
    assert (shown["num_compiled"], shown["num_cached"], shown["num_refused"]) == (2, 1, 0)
    assert shown["mean_mask_us"] == pytest.approx(shown["mask_ns"] / shown["num_masks"] / 1e3)
    assert "choice requests" in sage("llm", "grammar", "stats").out
