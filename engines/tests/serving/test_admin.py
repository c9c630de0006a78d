"""Admin connections and the runtime folder: light, and sure about which process they mean."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from sagellm.core import EngineDeadError, EngineError, UnknownNameError
from sagellm.engines.serving import AdminClient, RunningEngine
from sagellm.engines.serving.calls import Failed
from sagellm.engines.serving.frames import encode
from sagellm.engines.serving.runtime_folder import VARIABLE


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    return tmp_path / "run"


def announced(pid: int, name: str = "one") -> RunningEngine:
    engine = RunningEngine(name=name, pid=pid, url="http://127.0.0.1:1", model="m")
    engine.announce()
    return engine


def test_the_admin_client_loads_nothing_heavy():
    source = (
        "import sys; from sagellm.engines.serving import AdminClient, RunningEngine; RunningEngine.all();"
        "print([name for name in ('torch', 'numpy', 'transformers', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_listener_is_a_dead_engine(folder):
    with pytest.raises(EngineDeadError, match="no engine answers"):
        AdminClient.connect(folder / "none.sock")


def test_an_engine_that_says_nothing_is_given_up(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(EngineError, match="in time"):
            AdminClient.connect(tmp_path / "s", timeout_s=0.05)


def test_a_core_that_cannot_start_says_why(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def answer():
            peer, _ = listener.accept()
            with peer:
                peer.sendall(encode(Failed("there are no weights")))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineError, match="no weights"):
            AdminClient.connect(tmp_path / "s", timeout_s=10)
        thread.join()


def test_an_engine_lives_as_long_as_its_process(folder):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    engine = announced(process.pid)
    assert engine.is_alive
    assert [found.name for found in RunningEngine.all()] == ["one"]
    process.kill()
    deadline = time.monotonic() + 10
    while engine.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.is_alive, "a process that nobody has waited for is gone, too"
    process.wait()
    assert RunningEngine.all() == []
    assert RunningEngine.withdraw_dead() == [engine]
    assert list(folder.iterdir()) == []


def test_another_process_with_the_same_number_is_not_the_engine():
    engine = announced(os.getpid())
    assert engine.is_alive
    long_ago = 1_000_000_000
    os.utime(os.environ[VARIABLE] + "/one.json", (long_ago, long_ago))
    assert not engine.is_alive
    with pytest.raises(UnknownNameError, match="no engine runs"):
        RunningEngine.find()
