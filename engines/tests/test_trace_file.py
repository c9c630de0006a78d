"""`trace`: a file in Chrome's trace event format, as Perfetto reads it."""

from __future__ import annotations

import gc
import json
import stat
from collections import defaultdict

import pytest

from sagellm.core import ConfigError
from sagellm.engines import SamplingParams

SECRET = "a prompt that nobody else should read"
PHASES = ["schedule", "prepare", "forward", "sample", "advance"]


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


def test_a_step_is_a_span_with_its_phases_inside_in_order(events):
    open_spans, phases = [], []
    for event in events:
        if event["ph"] == "B":
            open_spans.append(event["name"])
            if event["name"] == "step":
                phases.append([])
            else:
                assert open_spans[-2] == "step"
                phases[-1].append(event["name"])
        elif event["ph"] == "E":
            assert open_spans.pop() == event["name"]
    assert open_spans == []
    assert phases == [PHASES] * 4


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


def test_a_file_that_cannot_be_written_is_told_before_a_model_is_loaded(make_engine, tmp_path):
    with pytest.raises(
        ConfigError, match=r"trace.file is '.*absent/trace.json', which cannot be written: No such"
    ):
        make_engine(trace=str(tmp_path / "absent" / "trace.json"), model="/no/such/model")
