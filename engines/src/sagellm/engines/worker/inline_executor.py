"""Computes steps in the thread that submits them."""

from __future__ import annotations

from collections import deque

from sagellm.core import ExecutorProtocol, StepInput, StepOutput, StepWorker
from sagellm.core.plugins.failure import contained


class InlineExecutor(ExecutorProtocol):
    """`submit` computes a step, and `collect` returns its output."""

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._done: deque[StepOutput | BaseException] = deque()

    def submit(self, step: StepInput) -> None:
        """Compute a step; `collect` raises its error. KeyboardInterrupt propagates."""
        with contained() as failure:
            self._done.append(self._worker.compute(step))
        if failure.error is not None:
            self._done.append(failure.error)

    def collect(self) -> StepOutput:
        """Return the output of the oldest step not yet collected, or raise its error."""
        done = self._done.popleft()
        if isinstance(done, StepOutput):
            return done
        raise done
