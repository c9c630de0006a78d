"""The process in which a plugin is tested, seen from outside."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.testing.conformance.hang import find_hang

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to standard error."""

_STACKS_S = 2.0
_WORKER = "sagellm.testing.conformance.worker"


@dataclass(frozen=True)
class Ended:
    """The process has ended, or was killed because it hung; `hung` is the method that did not return."""

    sentence: str
    hung: str | None = None


class WorkerProcess:
    """A worker in an empty folder of its own, which loads only one distribution's plugins.

    A context manager; at its end the process and everything it has started are gone.
    """

    def __init__(self, task: Mapping[str, Any], distribution: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._errors = Path(self._folder.name) / "stderr"
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._folder.name,
                env=_environment(distribution),
                start_new_session=True,
            )
        assert self._process.stdin is not None, "asked for as a pipe"
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it may be gone already
            stdin.write(json.dumps(dict(task)).encode())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._reader.join(timeout=1)  # unless the plugin passed its output to a detached process
        self._folder.cleanup()

    def next_event(self, timeout_s: float) -> dict[str, Any] | Ended:
        """Wait for the worker's next event; end the worker if none comes in time."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            hang = find_hang(self._stacks())
            self._end()
            where = "" if hang is None else f" (it was at {hang.place})"
            if hang is None or hang.method is None:
                return Ended(f"no answer within {timeout_s:g} s{where}; its process was ended")
            hung = f"{hang.method}() did not return within {timeout_s:g} s{where}; its process was ended"
            return Ended(hung, hang.method)
        return event if event is not None else Ended(self._how_it_ended())

    def _stacks(self) -> str:
        """Have the worker write the stacks of its threads, and return them."""
        known = self._errors.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, STACKS_SIGNAL)
        text, deadline = "", time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            read = self._errors.read_bytes()[known:].decode(errors="replace")
            if read and read == text:  # it has written all
                break
            text = read
        return text

    def _read(self) -> None:
        assert self._process.stdout is not None, "asked for as a pipe"
        with self._process.stdout as lines:
            for line in lines:
                self._events.put(json.loads(line))
        self._events.put(None)

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"with exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        lines = self._errors.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process ended {how}" + (f": {last[:200]}" if last and code >= 0 else "")


def _environment(distribution: str) -> dict[str, str]:
    """Give the worker this process's packages, but only the plugins of the distribution under test."""
    left_out = ("SAGELLM_PLUGINS_", "PYTEST_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "SAGELLM_PLUGINS_ALLOW": distribution,
    }
