"""Runs a script of `peers/` in another project's interpreter."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

_SCRIPTS = Path(__file__).parent / "peers"


class Peer(NamedTuple):
    """Where a peer is installed."""

    name: str
    python: str
    folder: str  # of modules, put on its path; may be empty

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Read `NAME=PYTHON` or `NAME=PYTHON:DIR`."""
        name, _, place = text.partition("=")
        python, _, folder = place.partition(":")
        if not name or not python:
            raise argparse.ArgumentTypeError(f"{text!r} is not a peer; write NAME=PYTHON or NAME=PYTHON:DIR")
        return cls(name, python, folder)

    def start(self, script: str) -> subprocess.Popen[str]:
        """Start `peers/NAME_script.py`; its errors go where ours do."""
        path = _SCRIPTS / f"{self.name}_{script}.py"
        if not path.exists():
            raise SystemExit(f"there is no benchmarks/peers/{path.name}")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        if self.folder:
            environment["PYTHONPATH"] = self.folder
        return subprocess.Popen(
            [self.python, "-W", "ignore", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )


class Conversation:
    """A peer's process that answers each line of JSON with one."""

    def __init__(self, peer: Peer, script: str) -> None:
        self.name = peer.name
        self._process = peer.start(script)

    def hear(self) -> Any:
        """Return the next line that it says."""
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}; its errors stand above")
        return json.loads(line)

    def ask(self, *question: Any) -> Any:
        """Say a line and return the answer."""
        assert self._process.stdin is not None, "a pipe"
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.hear()

    def end(self) -> None:
        """Let it end by the end of its input."""
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.close()
        self._process.wait()
