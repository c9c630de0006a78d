"""A served engine for benchmarks, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from sagellm.server.remote.running_engine import RunningEngine


@contextmanager
def served(model: str, port: int, *flags: str) -> Iterator[RunningEngine]:
    """Serve a model; gives the engine's entry while the server runs."""
    sage = [sys.executable, "-m", "sagellm.engines.cli", "llm", "engine"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        with patch.dict(os.environ, {"SAGELLM_RUNTIME_DIR": folder}):
            start = [*sage, "start", model, f"--port={port}", *flags]
            subprocess.run(start, check=True, stdout=subprocess.DEVNULL)
            try:
                [engine] = RunningEngine.all()
                yield engine
            finally:
                subprocess.run([*sage, "stop"], check=True, stdout=subprocess.DEVNULL)
