"""`trace`: a file in Chrome's trace event format, as Perfetto reads it."""

from __future__ import annotations

import gc
import json
import resource
import stat
from collections import defaultdict

import pytest

from sagellm.core import ConfigError
from sagellm.engines import SamplingParams

SECRET = "a prompt that nobody else should read"
PHASES = ["schedule", "prepare", "forward", "sample", "advance"]
NODES = {"copy", "read", "write", "decode", "prefill"}


@pytest.fixture
def events(make_engine, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("an older one")
    with make_engine(trace=str(path)) as engine:
        engine.generate([SECRET, "another"], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        live = engine.add_request("never ended", SamplingParams(max_tokens=9))
        engine.step()
        assert live
    assert SECRET not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return json.loads(path.read_text())


def test_each_event_has_what_the_format_asks_for(events):
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert event["ph"] in "BEbneiCM"
        if event["ph"] in "bne":
            assert event["id"]
            assert event["cat"] == "request"
    times = [event["ts"] for event in events]
    assert times == sorted(times)


def spans_of(events):
    """Return for each span the names of the spans around it, its name and its arguments, in order."""
    spans, names = [], []
    for event in events:
        if event["ph"] == "B":
            spans.append(([*names], event["name"], event.get("args", {})))
            names.append(event["name"])
        elif event["ph"] == "E":
            assert names.pop() == event["name"]
    assert names == []
    return spans


def test_a_step_is_a_span_with_its_phases_inside_in_order(events):
    phases = []
    for around, name, _ in spans_of(events):
        if name == "step":
            phases.append([])
        elif name not in NODES:
            assert around == ["step"]
            phases[-1].append(name)
    assert phases == [PHASES] * 4


def test_a_forward_pass_contains_the_nodes_that_it_computes(events):
    nodes = [(around, name, args) for around, name, args in spans_of(events) if name in NODES]
    *earlier, (_, name, last_prefill) = nodes  # the last step has the prompt that was added last
    assert all(around == ["step", "forward"] for around, _, _ in nodes)
    assert [name for _, name, _ in earlier] == ["prefill", "decode", "decode"]
    first_prefill, *decodes = (args for _, _, args in earlier)
    assert first_prefill["rows"] == 2
    assert first_prefill["tokens"] > 2
    assert decodes == [{"rows": 2, "tokens": 2}] * 2
    assert (name, last_prefill["rows"]) == ("prefill", 1)
    samples = [args for _, name, args in spans_of(events) if name == "sample"]
    assert samples == [{"rows": 2, "tokens": 2}] * 3 + [{"rows": 1, "tokens": 1}]


def test_once_steps_have_been_measured_nodes_and_passes_have_estimates(make_engine, tmp_path):
    path = tmp_path / "trace.json"
    with make_engine(trace=str(path), forward_backend="torch") as engine:
        engine.generate([5, 6, 7], SamplingParams(max_tokens=24, ignore_eos=True))
    spans = spans_of(json.loads(path.read_text()))
    whole = [args["estimated_step_us"] for _, name, args in spans if name == "forward" and args]
    decodes = [args["estimated_us"] for _, name, args in spans if name == "decode" and "estimated_us" in args]
    assert 0 < len(whole) == len(decodes) < 24
    assert all(0 <= decode <= step for decode, step in zip(decodes, whole, strict=True))
    assert whole[-1] > 0


def test_copies_of_shared_blocks_and_blocks_that_go_to_a_tier_are_spans(make_engine, tmp_path):
    path = tmp_path / "trace.json"
    tiers = [{"name": "host", "options": {"max_bytes": "1MiB"}}]
    with make_engine(trace=str(path), num_blocks=12, kv_tiers=tiers, kv_fetch="always") as engine:
        prompts = [[first, *range(5, 105)] for first in (5, 6, 7, 5)]
        prompts.append([*prompts[0][:40], *range(200, 250)])  # shares a part of a block
        for prompt in prompts:
            engine.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        block_bytes = engine.layout.block_bytes
    transfers = [(name, args) for _, name, args in spans_of(json.loads(path.read_text())) if "bytes" in args]
    assert {name for name, _ in transfers} == {"copy", "read", "write"}
    assert all(args["bytes"] == args["blocks"] * block_bytes > 0 for _, args in transfers)


def test_each_request_is_an_asynchronous_span_from_its_arrival_to_its_end(events):
    by_id = defaultdict(list)
    for event in events:
        if event["ph"] in "bne":
            by_id[event["id"]].append(event)
    assert len(by_id) == 3
    *whole, aborted = by_id.values()
    for begin, first_token, end in whole:
        assert [begin["name"], first_token["name"], end["name"]] == ["request", "first token", "request"]
        assert (begin["ph"], first_token["ph"], end["ph"]) == ("b", "n", "e")
        assert begin["args"]["num_prompt_tokens"] > 0
        assert (end["args"]["finish_reason"], end["args"]["num_output_tokens"]) == ("length", 3)
    assert aborted[-1]["args"]["finish_reason"] == "abort"


def test_queues_batches_and_blocks_are_counters(events):
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert counters.keys() == {"batch", "queues", "blocks"}
    assert counters["queues"] == {"waiting": 0, "running": 1}


def test_a_trace_is_whole_when_its_engine_is_gone(make_engine, tmp_path):
    path = tmp_path / "trace.json"
    engine = make_engine(trace=str(path))
    engine.generate([5, 6, 7], SamplingParams(max_tokens=2))
    del engine
    gc.collect()
    assert json.loads(path.read_text())[-1]["name"] in ("step", "blocks")


def test_an_engine_goes_on_when_the_disk_of_its_trace_is_full(make_engine, tmp_path, caplog):
    path = tmp_path / "trace.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = make_engine(trace=str(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with engine:
            outputs = engine.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=20, ignore_eos=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [len(one.outputs[0].token_ids) for one in outputs] == [20] * 3
    assert caplog.text.count("the trace ends here") == 1
    assert 1000 < path.stat().st_size <= 3000
    assert "request" in {event["name"] for event in json.loads(path.read_text())}


def test_a_file_that_cannot_be_written_is_told_before_a_model_is_loaded(make_engine, tmp_path):
    with pytest.raises(
        ConfigError, match=r"trace.file is '.*absent/trace.json', which cannot be written: No such"
    ):
        make_engine(trace=str(tmp_path / "absent" / "trace.json"), model="/no/such/model")
