"""`engine status|stop`: all that run, and one that is ended; processes that are stopped are real ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from sagellm.core.runtime_folder import runtime_folder
from sagellm.server.remote import AdminClient, EngineLock, RunningEngine
from sagellm.testing.patience import PATIENCE_S, wait_until

# A front as far as stopping goes; {answer} is what it does when it is asked to end.
_FRONT = """
import signal, sys, time
from sagellm.server.remote import EngineLock, RunningEngine
import os
lock = EngineLock("front")
engine = RunningEngine(name="front", pid=os.getpid(), url="http://127.0.0.1:8000", model="tiny")
def end(*_):
    {answer}
signal.signal(signal.SIGTERM, end)
engine.announce()
print("ready", flush=True)
while True:
    time.sleep(60)
"""
GOES = "lock.release(); sys.exit(0)"
STAYS = "pass"


@pytest.fixture
def start_front(run_engine):
    """Start a process that announces itself and ends in its own way; it is not waited for."""
    fronts: list[subprocess.Popen] = []

    def start(answer: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", _FRONT.format(answer=answer)], stdout=subprocess.PIPE
        )
        fronts.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in fronts:
        process.kill()
        process.wait()
        process.stdout.close()


def test_status_shows_every_engine_that_runs(make_engine, run_engine, sage):
    engine = make_engine(num_blocks=32)
    engine.add_request([5, 6, 7])
    run_engine(make_engine(num_blocks=64), "idle")
    one = run_engine(engine, "one")
    wait_until(lambda: not engine.client.core.has_unfinished())
    shown = {each["name"]: each for each in sage("llm", "engine", "status", "--json").json["engines"]}
    assert shown["one"]["num_running"] == 0
    assert (shown["one"]["state"], shown["one"]["num_blocks"], shown["idle"]["num_blocks"]) == (
        "ready",
        32,
        64,
    )
    assert shown["one"]["pid"] == os.getpid()
    assert shown["one"]["uptime_s"] > 0
    text = sage("llm", "engine", "status").out.splitlines()
    assert text[0].split() == [
        "NAME",
        "STATE",
        "MODEL",
        "URL",
        "PID",
        "UPTIME",
        "RUNNING",
        "WAITING",
        "KV",
        "USED",
    ]
    assert [line.split()[:4] for line in text[1:]] == [
        ["idle", "ready", "tiny", one.url],
        ["one", "ready", "tiny", one.url],
    ]


def test_status_without_an_engine_says_how_to_start_one(run_engine, sage):
    assert "engine start" in sage("llm", "engine", "status").out
    assert sage("llm", "engine", "status", "--json").json == {"engines": []}


def test_engines_that_do_not_answer_are_shown_so(make_engine, run_engine, sage, monkeypatch):
    connect, timeouts_s = AdminClient.connect, []

    def connect_patiently(path, *, timeout_s):
        timeouts_s.append(timeout_s)
        return connect(path, timeout_s=0.1 if path.name == "mute.sock" else PATIENCE_S)

    monkeypatch.setattr(AdminClient, "connect", connect_patiently)
    run_engine(make_engine(), "well")
    for name in ("mute", "gone"):
        RunningEngine(name=name, pid=os.getpid(), url="-", model="m").announce()
    with EngineLock("mute"), EngineLock("gone"), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime_folder() / "mute.sock"))
        listener.listen()
        result = sage("llm", "engine", "status", "--timeout", "0.5")
        shown = sage("llm", "engine", "status", "--timeout", "0.5", "--json").json["engines"]
    states = {each["name"]: (each["state"], each["num_running"]) for each in shown}
    assert states == {"gone": ("down", None), "mute": ("busy", None), "well": ("ready", 0)}
    assert "mute: the engine does not answer in time" in result.err
    assert (result.code, set(timeouts_s)) == (0, {0.5})


def test_status_tells_what_an_engine_is_about(make_engine, run_engine, sage):
    run_engine(make_engine(), "leaving")
    for name, state in (("leaving", "draining"), ("coming", "starting")):
        RunningEngine(name=name, pid=os.getpid(), url="-", model="m", state=state).announce()
    with EngineLock("coming"):
        result = sage("llm", "engine", "status", "--json")
    assert {each["name"]: each["state"] for each in result.json["engines"]} == {
        "coming": "starting",
        "leaving": "draining",
    }
    assert result.err == ""


def test_status_tells_of_an_engine_that_ended_unexpectedly(start_front, sage):
    front = start_front(STAYS)
    engine = RunningEngine.find("front")
    front.kill()
    engine.log.write_text("out of memory")
    wait_until(lambda: not engine.is_alive)
    result = sage("llm", "engine", "status")
    assert f"front (process {engine.pid}) ended unexpectedly; its log is {engine.log}" in result.err
    assert sage("llm", "engine", "status").err == ""


def test_status_is_quick_and_loads_no_torch(run_engine):
    source = (
        "import sys, time; begun = time.perf_counter(); from sagellm.engines.cli import main_llm\n"
        "try: main_llm(['engine', 'status'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_engine_that_is_stopped_is_gone(start_front, sage):
    process = start_front(GOES)
    result = sage("llm", "engine", "stop")
    assert (result.code, result.out.startswith("stopped front after ")) == (0, True)
    assert result.err == f"stopping front (process {process.pid})\n"
    assert process.wait(PATIENCE_S) == 0
    assert RunningEngine.all() == []


def test_an_engine_that_stays_is_told_and_killed_on_demand(start_front, sage):
    process = start_front(STAYS)
    stays = sage("llm", "engine", "stop", "front", "--timeout", "0.2")
    assert (stays.code, "still runs after 0.2 s" in stays.err, "--force" in stays.err) == (1, True, True)
    assert process.poll() is None
    killed = sage("llm", "engine", "stop", "--engine", "front", "--timeout", "0.2", "--force")
    assert (killed.code, killed.out.startswith("killed front")) == (0, True)
    assert process.wait(PATIENCE_S) == -9
    assert list(runtime_folder().iterdir()) == []


def test_stopping_waits_for_an_engine_that_takes_its_time(start_front, sage, tmp_path):
    start_front(f"time.sleep(0.5); open({str(tmp_path / 'done')!r}, 'x'); {GOES}")
    assert sage("llm", "engine", "stop").code == 0
    assert (tmp_path / "done").exists()


def test_what_does_not_run_cannot_be_stopped(start_front, sage):
    assert "no engine runs" in sage("llm", "engine", "stop").err
    start_front(GOES)
    result = sage("llm", "engine", "stop", "frond")
    assert (result.code, "Did you mean 'front'?" in result.err) == (1, True)
    both = sage("llm", "engine", "stop", "front", "--engine", "other")
    assert (both.code, both.err) == (2, "Error: two engines are named, front and --engine other; name one\n")


@pytest.mark.parametrize("form", [["front"], ["--engine", "front"], ["front", "--engine", "front"]])
def test_the_status_of_one_engine_is_asked_in_both_forms(start_front, sage, form):
    start_front(GOES)
    (found,) = sage("llm", "engine", "status", *form, "--json").json["engines"]
    assert found["name"] == "front"
    assert sage("llm", "engine", "status", "frond").code == 1


def test_an_engine_that_ended_by_itself_in_the_meantime_is_stopped(start_front, sage):
    process = start_front(GOES)
    threading.Timer(0.0, process.kill).start()
    result = sage("llm", "engine", "stop")
    assert result.code == 0 or "no engine runs" in result.err
