"""Where steps are computed: in the thread that plans them, in another, or in other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sagellm.core.errors import EngineError
from sagellm.core.protocols.step import StepInput, StepOutput, TokenMasks


class StepWorker(Protocol):
    """Computes steps. Workers that receive equal steps from the start return equal outputs."""

    def compute(self, step: StepInput) -> StepOutput:
        """Compute one step.

        A failure in the forward pass or in sampling is an error of all its rows; other failures are raised.
        """
        ...

    def launch(self, step: StepInput) -> Callable[[], StepOutput]:
        """Begin a step, and return a function that waits for it and returns its output.

        The functions are called once each, in the order of the steps; the next step may be begun before. A
        worker whose device is this process's CPU computes the step at once. Failures are as in `compute`.
        A step with `late_masks` is begun like any other; its masked rows are drawn in `add_masks`.
        """
        ...

    def add_masks(self, step: int, masks: TokenMasks) -> None:
        """Draw the rows of a launched step that waited for these masks."""
        ...


class ExecutorProtocol(ABC):
    """Computes steps in the order in which they are submitted.

    Providers are called as `factory(worker)`: `worker`, a StepWorker, computes a step in this
    process, and is what an executor with other processes replicates in each. One thread makes all calls.
    """

    depth: int = 0
    """Steps that may be in flight while the next one is planned: 0 if `submit` computes, else 1."""

    @abstractmethod
    def submit(self, step: StepInput) -> None:
        """Begin a step. A failure in it is reported by `collect`."""

    def submit_masks(self, step: int, masks: TokenMasks) -> None:
        """Give the masks that follow a submitted step: once, after the step before it is collected.

        Called only if `depth` is 1. By default it raises EngineError.
        """
        raise EngineError(f"{type(self).__name__} takes no masks after a step; use one of depth 0")

    def transfer(self, step: StepInput) -> bool:
        """Carry out a step of `kv_ops` alone at once, beside the steps in flight; say whether that is done.

        It has no output and is not collected. What it reads is in host memory, and the buffers of what it
        writes are free, when this returns. Raises the error of an operation. By default False: it is
        submitted like others, and all steps in flight are collected first.
        """
        return False

    @abstractmethod
    def collect(self) -> StepOutput:
        """Return the output of the oldest step in flight, waiting for it if necessary.

        Raises the step's error if it belongs to no row, such as an error in `kv_ops`.
        """

    def close(self) -> None:  # noqa: B027  (the calling thread has nothing to end)
        """End threads and processes; nothing is in flight, and this is the last call."""


class NullExecutor(ExecutorProtocol):
    """Computes nothing: every row of every step fails."""

    def __init__(self, worker: object = None) -> None:
        del worker
        self._steps: deque[StepInput] = deque()

    def submit(self, step: StepInput) -> None:
        """Keep the step."""
        self._steps.append(step)

    def collect(self) -> StepOutput:
        """Return an error for each row of the oldest step."""
        step = self._steps.popleft()
        error = EngineError("the null executor computes nothing; name another one in forward.executor")
        return StepOutput.failed(step, error)
