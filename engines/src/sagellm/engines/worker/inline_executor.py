"""Computes steps in the thread that submits them, or on the device that this thread drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sagellm.core import ExecutorProtocol, StepInput, StepOutput, StepWorker
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.step import TokenMasks


class InlineExecutor(ExecutorProtocol):
    """`submit` launches a step, which computes it if the device is this process's CPU; `collect` waits."""

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._launched: deque[Callable[[], StepOutput] | BaseException] = deque()

    def submit(self, step: StepInput) -> None:
        """Launch a step; `collect` raises its error. KeyboardInterrupt propagates."""
        with contained() as failure:
            self._launched.append(self._worker.launch(step))
        if failure.error is not None:
            self._launched.append(failure.error)
            failure.error = None

    def transfer(self, step: StepInput) -> bool:
        """Carry out a step that computes nothing."""
        self._worker.launch(step)()
        return True

    def collect(self) -> StepOutput:
        """Wait for the oldest step and return its output, or raise its error."""
        launched = self._launched.popleft()
        if isinstance(launched, BaseException):
            raise launched
        return launched()


class OverlappedExecutor(InlineExecutor):
    """Launches a step before the last one is collected: the host plans while the device computes.

    The device must compute beside this thread, as CUDA does; on a CPU each token comes a step later for
    nothing.
    """

    depth = 1

    def submit_masks(self, step: int, masks: TokenMasks) -> None:
        """Draw the rows of a launched step that waited for these masks."""
        self._worker.add_masks(step, masks)
