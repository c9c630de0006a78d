"""`simulate`: a table, JSON with METRICS' names, pictures, a file of requests, and clear errors."""

from __future__ import annotations

import json

import pytest

from sagellm.core import TraceRequest
from sagellm.engines.traces import write_trace


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say so with --capacity"),
        (("--capacity", "many"), "--capacity is 'many'"),
        (("--capacity", "0"), "at least one block"),
        (("--capacity", "5", "--eviction-policy", "lruu"), "Did you mean 'lru'"),
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
    assert (result.code, "'many' is no distribution of lengths" in result.err) == (2, True)
