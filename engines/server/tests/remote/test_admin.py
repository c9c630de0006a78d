"""Admin connections and the runtime folder: light, and sure about which process they mean."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from sagellm.core import ConfigError, EngineDeadError, EngineError, UnknownNameError
from sagellm.core.runtime_folder import VARIABLE
from sagellm.engines import EngineConfig
from sagellm.server.remote import AdminClient, EngineLock, RunningEngine, core_process
from sagellm.server.remote.frames import encode
from sagellm.server.remote.messages import Failed
from sagellm.server.serve import serve
from sagellm.testing.patience import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


def test_the_admin_client_loads_nothing_heavy():
    source = (
        "import sys; from sagellm.server.remote import AdminClient, RunningEngine; RunningEngine.all();"
        "print([name for name in ('torch', 'numpy', 'transformers', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_messages_and_the_front_load_no_torch():
    source = (
        "import sys; import sagellm.server.remote.messages; "
        "from sagellm.server.remote import CoreServer, RemoteEngine, SocketClient; "
        "import sagellm.server.http; "
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
from sagellm.server.remote import EngineLock, RunningEngine
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


GOOD = {"name": "x", "pid": 7, "url": "-", "model": "m"}


def entry(**changes) -> bytes:
    return json.dumps(GOOD | changes).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"name": "x"}',
        b"\xff\xfe",
        entry(pid="7"),
        entry(pid=-1),
        entry(pid=0),
        entry(url=5),
        entry(model=None),
        entry(state="dancing"),
        entry(started_s="now"),
        entry(name="y"),
        b"[" * 60_000,
        entry(model="m" * 100_000),
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)
def test_a_file_that_is_no_entry_is_named_once_and_then_removed(folder, caplog, content):
    path = folder / "x.json"
    path.write_bytes(content)
    with EngineLock("one"):
        RunningEngine(name="one", pid=1, url="-", model="m").announce()
        for _ in range(2):
            assert [engine.name for engine in RunningEngine.all()] == ["one"]
        (record,) = caplog.records
        assert record.getMessage().startswith(f"ignoring {path}, which is not an engine's file: ")
        assert RunningEngine.withdraw_dead() == []
        assert sorted(each.name for each in folder.iterdir()) == ["one.json", "one.lock"]


def test_an_entry_of_a_running_engine_is_kept_even_if_it_cannot_be_read(folder):
    """A newer version may have written it."""
    with EngineLock("x"):
        (folder / "x.json").write_bytes(b"{}")
        assert (RunningEngine.all(), RunningEngine.withdraw_dead()) == ([], [])
        assert (folder / "x.json").exists()


def make_foreign(path: Path, kind: str, elsewhere: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "link":
        elsewhere.write_bytes(entry())
        path.symlink_to(elsewhere)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "somebody else's":
        if os.getuid() != 0:
            pytest.skip("only root can give a file to somebody else")
        path.write_bytes(entry())
        os.chown(path, 12345, 12345)


FOREIGN = ["pipe", "folder", "socket", "link", "endless", "somebody else's"]


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_our_file_is_named_once_and_stays(folder, tmp_path, caplog, kind):
    make_foreign(folder / "x.json", kind, tmp_path / "elsewhere")
    for _ in range(2):
        assert RunningEngine.all() == []
        assert RunningEngine.withdraw_dead() == []
    assert len(caplog.records) == 1
    assert [each.name for each in folder.iterdir()] == ["x.json"]


@pytest.mark.parametrize("kind", ["folder", "link", "endless"])
def test_what_is_no_lock_keeps_its_name_from_engines_and_stops_no_other(folder, tmp_path, kind):
    make_foreign(folder / "x.lock", kind, tmp_path / "elsewhere")
    (folder / "x.json").write_bytes(entry())
    with EngineLock("one"):
        RunningEngine(name="one", pid=1, url="-", model="m").announce()
        assert [engine.name for engine in RunningEngine.all()] == ["one"]
        assert RunningEngine.withdraw_dead() == []
    with pytest.raises(ConfigError, match=r"x\.lock cannot be locked .*; remove it"):
        EngineLock("x")


def test_a_name_that_can_be_no_engines_is_ignored(folder):
    (folder / "bad name.json").write_bytes(entry(name="bad name"))
    assert (RunningEngine.all(), RunningEngine.withdraw_dead()) == ([], [])


def test_an_entry_is_written_over_what_stood_there_and_never_through_it(folder, tmp_path):
    os.mkfifo(folder / "x.partial")
    make_foreign(folder / "x.json", "link", tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    with EngineLock("x"):
        RunningEngine(name="x", pid=5, url="-", model="m").announce()
        (engine,) = RunningEngine.all()
        assert (engine.pid, (tmp_path / "elsewhere").read_bytes()) == (5, before)


def test_an_entry_that_cannot_be_written_is_a_wrong_setting(folder):
    (folder / "x.json").mkdir()
    with pytest.raises(ConfigError, match=r"x\.json, cannot be written: .*another runtime folder in SAGELLM"):
        serve(EngineConfig.from_flat(port=0), name="x", log_level="WARNING", on_state=print)


def test_keys_are_read_before_anything_is_loaded(folder, tmp_path):
    config = EngineConfig.from_flat(port=0, model="absent/model", api_key_file=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"server\.api_key_file is .*none', which cannot be read"):
        serve(config, log_level="WARNING", on_state=print)


def test_front_and_core_leave_no_memory_in_core_dumps(monkeypatch):
    limits = []
    monkeypatch.setattr("resource.setrlimit", lambda *limit: limits.append(limit))
    with pytest.raises(ConfigError, match="the engine's name"):
        serve(EngineConfig.from_flat(port=0), name="bad name", log_level="WARNING", on_state=print)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=BytesIO(b"no order")))
    with pytest.raises(ValueError, match="Expecting value"):
        core_process.main()
    assert limits == [(resource.RLIMIT_CORE, (0, 0))] * 2
