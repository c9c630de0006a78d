"""Admin connections and the runtime folder: light, and sure about which process they mean."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from patience import PATIENCE_S, wait_until

from sagellm.core import ConfigError, EngineDeadError, EngineError, UnknownNameError
from sagellm.core.runtime_folder import VARIABLE
from sagellm.engines.remote import AdminClient, EngineLock, RunningEngine
from sagellm.engines.remote.frames import encode
from sagellm.engines.remote.messages import Failed


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    return tmp_path / "run"


def test_the_admin_client_loads_nothing_heavy():
    source = (
        "import sys; from sagellm.engines.remote import AdminClient, RunningEngine; RunningEngine.all();"
        "print([name for name in ('torch', 'numpy', 'transformers', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_messages_and_the_front_load_no_torch():
    source = (
        "import sys; import sagellm.engines.remote.messages; "
        "from sagellm.engines.remote import CoreServer, RemoteEngine, SocketClient; "
        "import sagellm.engines.http; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_listener_is_a_dead_engine(folder):
    with pytest.raises(EngineDeadError, match="no engine answers"):
        AdminClient.connect(folder / "none.sock")


def test_an_engine_that_sends_nothing_times_out(tmp_path):
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
            AdminClient.connect(tmp_path / "s", timeout_s=PATIENCE_S)
        thread.join()


# An engine as far as its entry goes; it ends when it is killed.
_ENGINE = """
import os, sys
from sagellm.engines.remote import EngineLock, RunningEngine
lock = EngineLock("one")
RunningEngine(name="one", pid=os.getpid(), url="http://127.0.0.1:1", model="m").announce()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process(folder) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that has an engine's entry and lock."""
    process = subprocess.Popen([sys.executable, "-c", _ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def test_an_engine_is_alive_as_long_as_its_process_whatever_clocks_say(process, folder):
    (engine,) = RunningEngine.all()
    for seconds in (0, 3600, -3600, -(10**9)):  # a clock that is set makes files older or newer
        at = time.time() + seconds
        os.utime(folder / "one.json", (at, at))
        os.utime(folder / "one.lock", (at, at))
        assert engine.is_alive
        assert RunningEngine.withdraw_dead() == []
    with pytest.raises(ConfigError, match="'one' runs already"):
        EngineLock("one")
    process.kill()
    wait_until(lambda: not engine.is_alive, "a process that nobody has waited for is gone, too")
    assert RunningEngine.all() == []
    with pytest.raises(UnknownNameError, match="no engine runs"):
        RunningEngine.find()
    assert RunningEngine.withdraw_dead() == [engine]
    assert list(folder.iterdir()) == []


def test_a_name_is_free_again_when_its_engine_is_gone(folder):
    RunningEngine(name="one", pid=os.getpid(), url="-", model="m").announce()
    assert RunningEngine.all() == [], "this process lives, and the entry has its number, but not the lock"
    with EngineLock("one"):
        assert [engine.name for engine in RunningEngine.all()] == ["one"]
        assert RunningEngine.withdraw_dead() == []
    assert list(folder.iterdir()) == []


def test_asking_whether_an_engine_is_alive_keeps_none_from_starting(folder):
    is_done = threading.Event()

    def ask():
        while not is_done.is_set():
            RunningEngine.all()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(100):
            with EngineLock("one"):
                RunningEngine(name="one", pid=os.getpid(), url="-", model="m").announce()
    finally:
        is_done.set()
        asking.join()
