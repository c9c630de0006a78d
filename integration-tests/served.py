"""`sagellm serve` as a process of its own, for tests of what users point at it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from sagellm.testing.patience import reserved_port, wait_until


@contextmanager
def served(model: Path, folder: Path, *flags: str) -> Iterator[str]:
    """Serve a model in float32 and yield the server's URL; its log is in the folder."""
    log = folder / "serve.log"
    with reserved_port() as port, log.open("w") as errors:
        command = [sys.executable, "-m", "sagellm.engines.cli", "llm", "serve", str(model), *flags]
        command += ["--port", str(port), "--dtype", "float32", "--num-blocks", "512"]
        environment = {**os.environ, "SAGELLM_RUNTIME_DIR": str(folder / "runtime"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stderr=errors)
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(OSError):
                return urlopen(f"{url}/ready").status == 200
            return False

        try:
            wait_until(is_ready, "the server did not become ready")
            yield url
        finally:
            process.terminate()
            process.wait()
