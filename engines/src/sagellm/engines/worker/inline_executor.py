"""Computes steps in the thread that submits them."""

from __future__ import annotations

from collections import deque

from sagellm.core import ExecutorProtocol, StepInput, StepOutput, StepWorker


class InlineExecutor(ExecutorProtocol):
    """`submit` computes a step, and `collect` returns its output."""

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._done: deque[StepOutput | BaseException] = deque()

    def submit(self, step: StepInput) -> None:
        """Compute a step. Raises KeyboardInterrupt."""
        try:
            self._done.append(self._worker.compute(step))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._done.append(error)

    def collect(self) -> StepOutput:
        """Return the output of the oldest step not yet collected, or raise its error."""
        done = self._done.popleft()
        if isinstance(done, StepOutput):
            return done
        raise done
