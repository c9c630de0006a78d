"""`trace info|convert|anonymize`: what is in a trace, and other forms of it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from sagellm.core import TraceRequest, pack
from sagellm.lab.traces import read_trace, write_trace

TALK = pack(range(100, 220))


@pytest.fixture
def trace(tmp_path):
    """Write a trace as a recorder does with text."""
    path = tmp_path / "trace.jsonl.xz"
    requests = [
        TraceRequest(
            float(turn),
            40 * turn,
            10,
            token_ids=TALK[: 40 * turn],
            tenant="ann",
            conversation="monday",
            turn=turn,
            finish_reason="stop" if turn < 3 else "length",
            num_cached_tokens=40 * (turn - 1),
            ttft_s=0.25,
        )
        for turn in (1, 2, 3)
    ]
    write_trace(path, requests)
    return path


@pytest.mark.parametrize("name", ["info", "show"])
def test_info_says_what_is_in_a_trace(sage, trace, name):
    shown = sage("llm", "trace", name, trace, "--json").json
    assert (shown["num_requests"], shown["num_prompt_tokens"], shown["content"]) == (3, 240, "token ids")
    assert (shown["num_conversations"], shown["num_later_turns"]) == (1, 2)
    assert (shown["finish_reasons"], shown["cached_prompt_tokens"]) == ("2 stop, 1 length", 0.5)
    assert shown["ttft_ms_p50"] == 250
    assert "later turns" in sage("llm", "trace", name, trace).out


def test_show_is_not_listed(sage):
    listed = sage("llm", "trace", "--help").out
    assert "info" in listed
    assert "show" not in listed


def test_an_anonymous_trace_replays_alike_and_says_nothing(sage, trace, tmp_path):
    path = tmp_path / "anonymous.jsonl"
    done = sage("llm", "trace", "anonymize", trace, path, "--json").json
    assert (done["num_requests"], done["num_bytes"]) == (3, path.stat().st_size)
    text = path.read_text()
    for word in ("ann", "monday", "token_ids"):
        assert word not in text.replace("anonymize", "")
    options = ("--capacity", "20", "--eviction-policy", "lru", "--no-bounds", "--block-size", "16", "--json")
    saved = [
        sage("llm", "simulate", each, *options).json["runs"][0]["num_saved_tokens"] for each in (trace, path)
    ]
    assert saved == [120, 120]
    sage("llm", "trace", "anonymize", trace, tmp_path / "other.jsonl")
    ids = [row.block_ids[0] for name in (path, tmp_path / "other.jsonl") for row in read_trace(name)]
    assert len(set(ids)) == 2, "one for each salt"
    assert len({one.conversation for one in read_trace(path)}) == 1


def test_formats_follow_each_other(sage, trace, tmp_path):
    names = ("mooncake.jsonl", "own.jsonl.gz", "azure.csv", "again.jsonl")
    paths = [trace, *(tmp_path / name for name in names)]
    for source, target in pairwise(paths):
        to = ("--to", "mooncake") if "mooncake" in target.name else ()
        assert "3 requests" in sage("llm", "trace", "convert", source, target, *to).out
        assert [one.num_prompt_tokens for one in read_trace(target)] == [40, 80, 120]
    assert "block" in json.dumps(sage("llm", "trace", "info", paths[1], "--json").json["content"])
    assert sage("llm", "trace", "info", paths[4], "--json").json["content"] == "lengths alone"


def test_what_cannot_be_converted_is_said(sage, trace, tmp_path):
    lengths, target = tmp_path / "lengths.csv", tmp_path / "target.jsonl"
    sage("llm", "trace", "convert", trace, lengths)
    for arguments, told in (
        ((lengths, target, "--to", "mooncake"), "this trace has lengths alone"),
        ((trace, target, "--to", "mooncack"), "Did you mean 'mooncake'?"),
        ((trace, lengths), "exists; name another file, or overwrite it with --overwrite"),
        ((trace, trace), "is the file that is read"),
        ((tmp_path / "none", target), "No such file"),
        ((trace, tmp_path / "none" / "x"), "does not exist"),
        ((trace, target, "--reader", "azur"), "Did you mean 'azure'?"),
    ):
        failed = sage("llm", "trace", "convert", *arguments)
        assert failed.code, arguments
        assert told in failed.err, failed.err
        assert not target.exists()
    assert sage("llm", "trace", "convert", trace, lengths, "--force").code == 0


def test_formats_are_completed():
    from sagellm.lab.cli.trace import complete_format

    assert complete_format("m") == ["mooncake"]
    assert complete_format("") == ["sagellm", "mooncake", "azure"]


def test_a_recording_is_found_by_its_name(sage, trace, tmp_path, monkeypatch):
    folder = tmp_path / "recordings"
    folder.mkdir()
    recording = folder / "monday.jsonl"
    write_trace(recording, read_trace(trace))
    monkeypatch.setenv("SAGELLM_RECORDING__FOLDER", str(folder))
    monkeypatch.chdir(tmp_path)
    assert sage("llm", "trace", "info", "monday", "--json").json["num_requests"] == 3
    arguments = ("monday", "--num-blocks", "9", "--b", "eviction=lru", "--json")
    assert sage("llm", "ab", *arguments).json["trace"] == str(recording)
    simulated = sage("llm", "simulate", "monday.jsonl", "--capacity", "9", "--json")
    assert simulated.json["trace"] == str(recording)
    for command in (("trace", "info"), ("simulate", "--capacity", "9"), ("bench", "serve", "--trace")):
        missing = sage("llm", *command, "tuesday")
        assert missing.code == 2
        assert f"neither a trace tuesday here nor a recording {folder / 'tuesday.jsonl'}" in missing.err
