"""`simulate`: a table, JSON with METRICS' names, pictures, a file of requests, and clear errors."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from sagellm.core import TraceRequest
from sagellm.lab.plots import _draw_sharing
from sagellm.lab.traces import write_trace

OTHER_LRU = """
from sagellm.core import Provider, hookimpl

@hookimpl
def sagellm_providers():
    target = "sagellm.kvmgr.eviction:FIFOEvictionPolicy"
    return [Provider("eviction_policy", "lru", target, "by another name")]
"""


@pytest.fixture
def tenants(tmp_path):
    """Two tenants: one comes back to its conversation after the other has filled the cache."""
    paths = [("a", (0, 1, 2)), ("b", (3, 4)), ("b", (5, 6)), ("a", (0, 1, 2, 7)), ("b", (3, 4, 8))] * 2
    requests = [
        TraceRequest(float(i), 4 * len(path), 1, path, 4, tenant=tenant)
        for i, (tenant, path) in enumerate(paths)
    ]
    path = tmp_path / "tenants.jsonl"
    write_trace(path, requests)
    return path


@pytest.fixture
def trace(tmp_path):
    paths = [(0, 1, 2), (0, 3), (0, 1, 2, 4), (0, 5), (0, 1, 2, 4, 6)]
    requests = [TraceRequest(float(i), 4 * len(path), 1, path, 4) for i, path in enumerate(paths)]
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests)
    return path


def test_it_prints_policies_beside_their_bounds(trace, sage):
    out = sage("llm", "simulate", trace, "--capacity", "5,100", "--eviction-policy", "fifo,off").out
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:6] == ["5", "requests,", "64", "prompt", "tokens,", "blocks"]
    rows = [line[:2] for line in lines[4:]]
    assert rows == [
        [name, capacity] for capacity in ("5", "100") for name in ("fifo", "off", "lru", "belady")
    ]


def test_json_has_the_names_of_the_metrics(trace, sage):
    found = sage("llm", "simulate", trace, "--capacity", "100", "--no-bounds", "--json").json
    (run,) = found["runs"]
    assert (run["eviction_policy"], run["capacity"], found["block_size"]) == ("reuse", 100, 4)
    assert run["token_saving"] == run["token_hit_rate"] == found["upper_bound"] == 36 / 64
    assert found["ideal"] == 36 / 64, "in this trace only whole blocks are alike"
    assert (run["num_reused_blocks"], run["num_new_blocks"]) == (9, 7)
    assert {"block_sharing_fraction", "sharing_fraction_source", "re_prefill_rate", "gap_closed"} <= set(run)


def test_pictures_and_requests_are_written(trace, sage, tmp_path):
    picture, requests = tmp_path / "hits.svg", tmp_path / "requests.jsonl"
    sage("llm", "simulate", trace, "--capacity", "5", "--plot", picture, "--requests", requests)
    assert picture.read_text().lstrip().startswith("<?xml")
    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    assert len(rows) == 3 * 5  # the default policy, lru and belady
    assert sum(row["num_saved_tokens"] for row in rows if row["eviction_policy"] == "belady") == 36


def test_options_stand_with_the_cache_and_with_each_policy(tenants, sage):
    arguments = ("llm", "simulate", tenants, "--capacity", "6", "--no-bounds", "--json")
    quotas = ("--prefix-cache", "radix{tenant_quotas={a: 1}, reuses_partial_blocks=false}")

    def saved(*flags: str) -> list[int]:
        return [run["num_saved_tokens"] for run in sage(*arguments, *flags).json["runs"]]

    assert saved("--eviction-policy", "lru") > saved("--eviction-policy", "lru", *quotas)
    first, second = saved("--eviction-policy", "qos{weights={b: 100.0}},lru")
    assert [first] != saved("--eviction-policy", "qos"), "the weights decide"
    assert [second] == saved("--eviction-policy", "lru"), "these have no options"


def test_bounds_know_no_quotas(tenants, sage):
    arguments = ("llm", "simulate", tenants, "--capacity", "6", "--eviction-policy", "lru", "--json")
    free = sage(*arguments).json
    bound = sage(*arguments, "--prefix-cache", "radix{tenant_quotas={'*': 1}}").json
    assert (bound["upper_bound"], bound["ideal"]) == (free["upper_bound"], free["ideal"])
    (lru, belady), (bound_lru, bound_belady) = (
        [run["token_saving"] for run in found["runs"]] for found in (free, bound)
    )
    assert belady == bound_belady
    assert bound_lru < lru


def test_of_two_policies_that_are_called_lru_ours_is_the_bound(tenants, sage, install):
    install("moon-plugin", OTHER_LRU)
    arguments = ("llm", "simulate", tenants, "--capacity", "6", "--json", "--eviction-policy")
    runs = sage(*arguments, "moon-plugin:lru").json["runs"]
    names = ["moon-plugin:lru", "sagellm-eviction-policy:lru", "belady"]
    assert [run["eviction_policy"] for run in runs] == names
    assert runs[0]["gap_closed"] is not None
    assert [run["eviction_policy"] for run in sage(*arguments, names[1]).json["runs"]] == names[1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say so with --capacity"),
        (("--capacity", "many"), "--capacity is 'many'"),
        (("--capacity", "0"), "at least one block"),
        (("--capacity", "5", "--eviction-policy", "lruu"), "Did you mean 'lru'"),
        (("--capacity", "5", "--eviction-policy", "off{a=1}"), "takes no options"),
        (("--capacity", "5", "--eviction-policy", "lru{a=1}"), "takes no options"),
        (("--capacity", "5", "--prefix-cache", "radix{pages=1}"), "it takes max_ghost_blocks"),
        (("--capacity", "5", "--block-size", "3"), "give a divisor"),
        (("--capacity", "5", "--plot", "/nowhere/a.png"), "/nowhere"),
        (("--capacity", "5", "--requests", "/nowhere/a.jsonl"), "/nowhere"),
    ],
)
def test_what_is_wrong_is_said(trace, sage, arguments, message):
    result = sage("llm", "simulate", trace, *arguments)
    assert result.code in (1, 2)
    assert message.lower() in result.err.lower()
    assert "Traceback" not in result.err


def test_a_trace_of_lengths_alone_cannot_be_replayed(sage, tmp_path):
    path = tmp_path / "lengths.jsonl"
    write_trace(path, [TraceRequest(0.0, 50, 5)])
    result = sage("llm", "simulate", path, "--capacity", "5")
    assert (result.code, "neither token ids nor block ids" in result.err) == (2, True)


def test_a_trace_is_generated_shown_and_replayed(sage, tmp_path):
    path = tmp_path / "made.jsonl.xz"
    made = sage(
        "llm", "trace", "generate", path, "--num-requests", "20", "--turns", "4", "--num-tenants", "2"
    )
    assert "20 requests of" in made.out
    shown = sage("llm", "trace", "show", path, "--json").json
    assert (shown["num_requests"], shown["num_tenants"], shown["content"]) == (20, 2, "token ids")
    assert "duration" in sage("llm", "trace", "show", path).out
    found = sage("llm", "simulate", path, "--capacity", "500", "--no-bounds", "--json").json
    assert (found["block_size"], found["upper_bound"] > 0.3) == (16, True)
    again = sage("llm", "trace", "generate", tmp_path / "b.jsonl", "--num-requests", "5", "--arrivals", path)
    assert again.code == 0
    result = sage("llm", "trace", "generate", tmp_path / "c.jsonl", "--turns", "many")
    assert (result.code, "'many' is not a distribution of lengths" in result.err) == (2, True)


def test_a_trace_that_exists_is_overwritten_only_by_force(sage, tmp_path):
    path = tmp_path / "made.jsonl"
    path.write_text("precious\n")
    refused = sage("llm", "trace", "generate", path, "--num-requests", "2")
    assert (refused.code, path.read_text()) == (2, "precious\n")
    assert f"{path} exists; name another file, or overwrite it with --overwrite" in refused.err
    assert sage("llm", "trace", "generate", path, "--num-requests", "2", "--overwrite").code == 0
    assert sage("llm", "trace", "show", path, "--json").json["num_requests"] == 2


def test_policies_that_share_alike_are_all_seen():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    names = ("reuse", "lru", "belady")
    _draw_sharing(axes, {name: [0.1, 0.1, 0.9] for name in names}, dict.fromkeys(names, "C0"))
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches if bar.get_height())
    assert len(spans) == 6
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))


def test_faults_are_simulated_from_seeds(sage):
    out = sage("llm", "simulate", "--faults", "--seeds", "2", "--first", "5").out
    assert "2 seeds" in out
    assert "0 violations" in out
    found = sage("llm", "simulate", "--faults", "--seeds", "1", "--json").json
    assert (found["num_seeds"], found["violations"]) == (1, [])
    assert found["num_answered"] > 0


def test_a_violation_is_shown_with_the_command_that_repeats_it(sage, monkeypatch):
    from sagellm.engines.requests.output_stream import OutputStreams

    monkeypatch.setattr(OutputStreams, "deliver", lambda self, outputs: None)
    done = sage("llm", "simulate", "--faults", "--seeds", "1", "--only", "6")
    assert done.code == 1
    assert "not answered" in done.out
    assert "sage llm simulate --faults --seeds 1 --first 0 --only 6" in done.out


def test_without_a_trace_and_without_faults_it_says_what_is_missing(sage):
    assert "--faults" in sage("llm", "simulate").err
    assert "3,7,12" in sage("llm", "simulate", "--faults", "--only", "three").err
