"""Runs jobs in processes of their own, several at once, and ends them all if one fails or the user stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from threading import Lock
from typing import IO

from sagellm.core import ConfigError
from sagellm.engines.progress import Advance
from sagellm.lab.ab.run import Job, Result
from sagellm.lab.bench.errors import BenchmarkError

_PROGRAM = "sagellm.lab.ab.run"
_SHOWN_ERROR_LINES = 5
_LONGEST_WAIT_S = 0.2


def run_jobs(jobs: Sequence[Job], num_processes: int, advance: Advance) -> list[Result]:
    """Run jobs and return their results in the order of the jobs.

    Each process is a fresh interpreter and gets its job as JSON. `advance` is told of requests. If one
    fails the others are stopped, and its error, by the name of the job, is raised once all have ended.
    """
    running = _Running(advance)
    with ThreadPoolExecutor(min(num_processes, len(jobs)), "sagellm-ab") as threads:
        try:
            futures = [threads.submit(running.run, job) for job in jobs]
            return [_await(future) for future in futures]
        except Exception as error:
            raise running.first_error or error from None
        finally:
            running.stop()


def _await(future: Future[Result]) -> Result:
    """Return or raise what the future holds. An interrupt that comes just before a wait is seen after it."""
    while not future.done():
        with suppress(TimeoutError):
            future.exception(_LONGEST_WAIT_S)
    return future.result()


class _Running:
    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._lock = Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_stopped = False
        self.first_error: Exception | None = None

    def run(self, job: Job) -> Result:
        """Run a job; if that fails, all others are stopped."""
        try:
            return self._run(job)
        except Exception as error:
            if not self._is_stopped:
                self.first_error = error
                self.stop()
            raise

    def _run(self, job: Job) -> Result:
        # Not a pipe: nobody reads it until the process has ended, and a full pipe would hold that up.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = self._start(errors)
            if process is None:
                raise BenchmarkError(f"{job.name}: stopped")
            last = self._follow(process, job)
            errors.seek(0)
            return _result(job, last, deque(errors, _SHOWN_ERROR_LINES))

    def _follow(self, process: subprocess.Popen[str], job: Job) -> dict[str, object]:
        """Hand a process its job, and return the last line that it wrote."""
        assert process.stdin is not None and process.stdout is not None, "both are pipes"  # noqa: PT018
        last: dict[str, object] = {}
        with process:
            with suppress(BrokenPipeError):  # it has ended already: its error says why
                process.stdin.write(json.dumps(asdict(job)))
                process.stdin.close()
            for line in process.stdout:
                last = json.loads(line)
                if "done" in last:
                    with self._lock:
                        self._advance(float(str(last["done"])))
        with self._lock:
            self._processes.discard(process)
        return last

    def stop(self) -> None:
        """End what still runs; what has not started does not start."""
        with self._lock:
            self._is_stopped = True
            for process in self._processes:
                with suppress(ProcessLookupError):
                    process.kill()

    def _start(self, errors: IO[str]) -> subprocess.Popen[str] | None:
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with self._lock:
            if self._is_stopped:
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env=os.environ | single | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends them
            )
            self._processes.add(process)
        return process


def _result(job: Job, last: dict[str, object], errors: Iterable[str]) -> Result:
    if isinstance(last.get("result"), dict):
        return Result(**last["result"])  # type: ignore[arg-type]
    if "error" in last:
        kind = ConfigError if last["is_usage"] else BenchmarkError
        raise kind(f"{job.name}: {last['error']}")
    raise BenchmarkError(f"{job.name}: its process ended before it was done\n{''.join(errors)}".rstrip())
