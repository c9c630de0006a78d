"""What is recorded of requests: enough to replay them, nothing that they said, whatever the disk does."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from sagellm.core import ConfigError, InvalidInputError, Namespace, Tenant
from sagellm.engines import SamplingParams
from sagellm.engines.recording import recording
from sagellm.engines.recording.recorder import Recorder
from sagellm.engines.recording.recorder_admin import RecorderAdmin
from sagellm.testing.patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(40, 77))
FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
from sagellm.engines import LLMEngine, SamplingParams
engine = LLMEngine(model=sys.argv[1], record=sys.argv[2], num_blocks=64, device="cpu", dtype="float32")
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
recorder = engine.client.core.parts.recorder
for number in range(1000):
    outputs = engine.generate([[5, 6, 7 + number % 50] * 9], params)
    assert len(outputs[0].outputs[0].token_ids) == 6
    if not recorder.is_recording:
        break
print(recorder.metrics().num_recorded, recorder.metrics().failure)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "traffic.jsonl"


def rows(path) -> list[dict]:
    """Return the lines behind the head."""
    head, *found = map(json.loads, path.read_text().splitlines())
    assert (head["format"], head["version"], head["block_tokens"]) == ("sagellm-trace", 1, 16)
    return found


def recorder_of(engine) -> Recorder:
    return engine.client.core.parts.recorder


def run(engine, *prompts, **options) -> None:
    for prompt in prompts:
        engine.generate([prompt], GREEDY, **options)


def test_a_line_says_what_a_request_was_and_what_became_of_it(make_engine, path):
    engine = make_engine(record=path)
    run(engine, PROMPT)
    run(engine, [*PROMPT, 3], namespace=Namespace("ann"))
    recorder_of(engine).stop()
    first, second = rows(path)
    assert (first["num_prompt_tokens"], first["num_output_tokens"]) == (37, 6)
    assert (first["finish_reason"], first["max_tokens"], first["num_cached_tokens"]) == ("length", 6, 0)
    assert first["params"] == {"temperature": 0.0, "ignore_eos": True}
    assert 0 < first["ttft_s"] <= first["total_s"]
    assert second["arrival_s"] >= first["arrival_s"] + first["total_s"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_there_are_no_tokens_in_it_unless_they_are_asked_for(make_engine, path, caplog):
    engine = make_engine(record=path)
    run(engine, PROMPT)
    recorder_of(engine).stop()
    assert "token_ids" not in path.read_text()
    assert "RECORDING TEXT" not in caplog.text
    engine = make_engine(record=path, record_text=True)
    [output] = engine.generate([PROMPT], GREEDY)
    recorder_of(engine).stop()
    (row,) = rows(path)
    assert row["token_ids"] == PROMPT
    assert row["output_token_ids"] == list(output.outputs[0].token_ids)
    assert "RECORDING TEXT" in caplog.text


def test_ids_are_equal_where_all_tokens_before_are(make_engine, path):
    engine = make_engine(record=path)
    other = [*PROMPT[:20], 9, *PROMPT[21:]]
    run(engine, PROMPT, PROMPT, other)
    recorder_of(engine).stop()
    one, same, differs = rows(path)
    assert len(one["block_ids"]) == 3
    assert one["block_ids"] == same["block_ids"]
    assert one["output_block_ids"] == same["output_block_ids"]
    assert one["block_ids"][0] == differs["block_ids"][0]
    assert not set(one["block_ids"][1:]) & set(differs["block_ids"][1:]), "block 2 equals, but not all before"
    assert differs["agrees"] == [1, one["block_ids"][1], 4]
    assert differs["num_cached_tokens"] == 20


def test_the_ids_of_two_recordings_and_of_two_tenants_have_nothing_in_common(make_engine, path, tmp_path):
    seen: list[int] = []
    engine = make_engine(record=path, record_folder=tmp_path)
    for name in ("one", "two"):
        run(engine, PROMPT, namespace=Namespace(name))
    recorder_of(engine).stop()
    RecorderAdmin(recorder_of(engine), lambda: 0).start("again")
    run(engine, PROMPT, namespace=Namespace("one"))
    recorder_of(engine).stop()
    for row in (*rows(path), *rows(tmp_path / "again.jsonl")):
        seen += [*row["block_ids"][:2], *row["output_block_ids"]]
    assert len(seen) == len(set(seen)) == 9


def test_tenants_have_names_of_their_own(make_engine, path):
    engine = make_engine(record=path)
    for name in ("ann", "bob", "ann", "default"):
        engine.add_request(PROMPT, GREEDY, tenant=Tenant(name))
        while engine.has_unfinished_requests():
            engine.step()
    recorder_of(engine).stop()
    names = [row.get("tenant") for row in rows(path)]
    assert names[0] == names[2] != names[1]
    assert names[3] is None
    assert "ann" not in path.read_text()


def test_turns_of_a_conversation_are_found(make_engine, path):
    engine = make_engine(record=path)
    talk, alone = list(PROMPT), PROMPT[5:]
    for _ in range(3):
        run(engine, alone)
        [output] = engine.generate([talk], GREEDY)
        talk += [*output.outputs[0].token_ids, 7, 8, 9]
    recorder_of(engine).stop()
    found = [(row["conversation"], row["turn"]) for row in rows(path)]
    assert found[1::2] == [("2", 1), ("2", 2), ("2", 3)]
    assert [turn for _, turn in found[::2]] == [1, 1, 1], "the same prompt again is not a later turn"
    assert len({conversation for conversation, _ in found}) == 4


def test_requests_that_are_aborted_are_in_it(make_engine, path):
    engine = make_engine(record=path)
    name = engine.add_request(PROMPT, GREEDY)
    engine.step()
    engine.abort_request(name)
    waiting = engine.add_request(PROMPT, GREEDY)
    engine.abort_request(waiting)
    recorder_of(engine).stop()
    assert [row["finish_reason"] for row in rows(path)] == ["abort", "abort"]


def test_a_full_file_gets_a_number_and_the_oldest_goes(make_engine, path):
    engine = make_engine(record=path, record_max_file_size="2000", record_max_files=3)
    run(engine, *([number, *PROMPT] for number in range(60)))
    found = recorder_of(engine).stop()
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["traffic.jsonl", "traffic.jsonl.1", "traffic.jsonl.2"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert len({file.read_text().splitlines()[0] for file in files}) == 1, "of one recording"
    arrivals = [row["arrival_s"] for file in reversed(files) for row in rows(file)]
    assert all(one < other for one, other in pairwise(arrivals)), "in their order, and none twice"
    assert len(arrivals) < 60 == found.num_recorded


def test_a_file_that_exists_is_kept(make_engine, path):
    path.write_text("precious\n")
    recorder_of(make_engine(record=path)).stop()
    recorder_of(make_engine(record=path)).stop()
    assert path.with_name("traffic.jsonl.2").read_text() == "precious\n"
    assert rows(path) == rows(path.with_name("traffic.jsonl.1")) == []


def test_what_does_not_fit_into_the_queue_is_counted(make_engine, path, monkeypatch):
    engine = make_engine(record=path)
    run(engine, PROMPT)
    monkeypatch.setattr(recording, "_MAX_QUEUED", 0)
    run(engine, PROMPT, PROMPT)
    found = recorder_of(engine).stop()
    assert (found.num_recorded, found.num_dropped, len(rows(path))) == (1, 2, 1)


def test_a_device_that_is_full_ends_the_recording_alone(make_engine, caplog):
    engine = make_engine(record="/dev/full")
    found = recorder_of(engine).metrics()
    assert (found.is_recording, found.failure) == (False, "No space left on device")
    run(engine, PROMPT)
    told = [record for record in caplog.records if "the recording ended" in record.message]
    assert len(told) == 1
    assert recorder_of(engine).metrics() == found


def test_a_file_too_slow_to_close_ends_the_recording_as_a_failure(make_engine, path, monkeypatch, caplog):
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # full after a dozen lines, until somebody reads
    engine = make_engine(record=path)
    run(engine, *([number, *PROMPT] for number in range(40)))
    monkeypatch.setattr(recording, "_CLOSE_S", 0.1)
    found = recorder_of(engine).stop()
    assert not found.is_recording
    assert found.failure == "writing what was queued took more than 0.1 s"
    assert (found.num_recorded + found.num_dropped, found.num_dropped > 20) == (40, True)
    with os.fdopen(reader, "rb") as pipe:
        os.set_blocking(reader, True)
        num_lines = pipe.read().count(b"\n")  # to the end: the thread goes on, and closes its file
    late = recorder_of(engine).metrics()
    assert (late.num_recorded, late.num_recorded + late.num_dropped) == (num_lines - 1, 40)
    told = [record.message for record in caplog.records if "the recording ended" in record.message]
    assert len(told) == 1
    assert f"{found.num_dropped} more were dropped" in told[0]


@pytest.mark.parametrize("size", [300, 3001, 5003])
def test_a_disk_that_fills_leaves_whole_lines(checkpoint, path, size):
    done = subprocess.run(
        [sys.executable, "-c", FULL, checkpoint, path, str(size)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    count, _, failure = done.stdout.strip().partition(" ")
    assert failure == "File too large"
    assert len(rows(path)) == int(count)
    assert path.read_bytes().endswith(b"\n")
    assert done.stderr.count("the recording ended") == 1


def test_what_cannot_be_recorded_to_is_said_before_loading(make_engine, tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory; name another file"):
        make_engine(model="nowhere", record=tmp_path / "none" / "traffic.jsonl")
    with pytest.raises(ConfigError, match="cannot be recorded to"):
        make_engine(model="nowhere", record=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be recorded to"):
        make_engine(model="nowhere", record=tmp_path / "pipe")  # nobody reads it
    with pytest.raises(ConfigError, match=r"recording\.file names no file"):
        make_engine(model="nowhere", record_text=True)
    with pytest.raises(ConfigError, match=r"recording\.max_file_size"):
        make_engine(record=tmp_path / "traffic.jsonl", record_max_file_size="much")


@pytest.mark.parametrize("name", ["", "../up", "a/b", "/etc/passwd", ".hidden", "x" * 101, 5, None])
def test_an_operator_names_recordings_and_never_paths(make_engine, tmp_path, name):
    admin = RecorderAdmin(recorder_of(make_engine(record_folder=tmp_path / "recordings")), lambda: 0)
    with pytest.raises(InvalidInputError, match="must be letters"):
        admin.start(name)
    assert not list(tmp_path.iterdir())


def test_recordings_begin_and_end_while_the_engine_runs(make_engine, tmp_path):
    engine = make_engine(record_folder=tmp_path)
    admin = RecorderAdmin(recorder_of(engine), lambda: 0)
    assert not admin.status().path
    with pytest.raises(ConfigError, match="no requests are being recorded"):
        admin.stop()
    run(engine, PROMPT)
    admin.start("monday")
    with pytest.raises(ConfigError, match="stop that first"):
        admin.start("tuesday")
    run(engine, PROMPT, PROMPT)
    assert admin.stop().num_recorded == len(rows(tmp_path / "monday.jsonl")) == 2
    run(engine, PROMPT)
    assert admin.status().num_recorded == 2
