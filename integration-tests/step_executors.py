"""Executors for tests: late ones, and one with a replica of the worker in another process."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import threading
from multiprocessing import shared_memory
from typing import Any

import torch

from sagellm.core import ExecutorProtocol, StepInput, StepOutput, StepWorker
from sagellm.core.protocols.step import TokenMasks
from sagellm.engines import LLMEngine


class LateExecutor(ExecutorProtocol):
    """Computes in a thread of its own, so that one step is in flight while the next one is planned."""

    depth = 1

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._steps: queue.Queue[StepInput | tuple[int, TokenMasks] | None] = queue.Queue()
        self._done: queue.Queue[StepOutput | BaseException] = queue.Queue()
        self.most_in_flight = self._num_in_flight = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, step: StepInput) -> None:
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        self._steps.put(step)

    def submit_masks(self, step: int, masks: TokenMasks) -> None:
        self._steps.put((step, masks))

    def collect(self) -> StepOutput:
        done = self._done.get(timeout=120)
        self._num_in_flight -= 1
        if isinstance(done, StepOutput):
            return done
        raise done

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        finish = None
        while (given := self._steps.get()) is not None:
            try:
                if isinstance(given, StepInput):
                    finish = self._worker.launch(given)
                    if given.late_masks is not None:
                        continue  # its masks follow
                else:
                    self._worker.add_masks(*given)
                self._done.put(finish())
            except BaseException as error:
                self._done.put(error)


def with_executor(monkeypatch: Any, make: Any) -> None:
    """Have engines that are made from now on compute steps there."""
    monkeypatch.setattr("sagellm.engines.worker.inline_executor.InlineExecutor", make)


class Mailbox:
    """One message at a time from one process to another, through shared memory."""

    def __init__(self, context: Any, size: int = 1 << 22) -> None:
        self.memory = shared_memory.SharedMemory(create=True, size=size)
        self.is_full, self.is_empty = context.Semaphore(0), context.Semaphore(1)

    def put(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        assert self.is_empty.acquire(timeout=120)
        self.memory.buf[:8] = len(data).to_bytes(8, "little")
        self.memory.buf[8 : 8 + len(data)] = data
        self.is_full.release()

    def take(self) -> Any:
        assert self.is_full.acquire(timeout=120)
        size = int.from_bytes(self.memory.buf[:8], "little")
        message = pickle.loads(bytes(self.memory.buf[8 : 8 + size]))  # noqa: S301  (our own process)
        self.is_empty.release()
        return message


class ReplicatingExecutor(ExecutorProtocol):
    """Computes each step here and in another process, and has both outputs side by side."""

    settings: dict[str, Any]  # of the engine, whose worker the other process makes for itself

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        context = multiprocessing.get_context("spawn")
        self._steps, self._outputs = Mailbox(context), Mailbox(context)
        self._done: list[StepOutput] = []
        self.pairs: list[tuple[StepOutput, StepOutput]] = []
        self._process = context.Process(target=replica, args=(self.settings, self._steps, self._outputs))
        self._process.start()

    def submit(self, step: StepInput) -> None:
        self._steps.put(step)
        self._done.append(self._worker.compute(step))

    def collect(self) -> StepOutput:
        output = self._done.pop()
        self.pairs.append((output, self._outputs.take()))
        return output

    def close(self) -> None:
        self._steps.put(None)
        self._process.join(60)
        for box in (self._steps, self._outputs):
            box.memory.close()
            box.memory.unlink()


def replica(settings: dict[str, Any], steps: Mailbox, outputs: Mailbox) -> None:
    """Make a worker as the engine does, and compute the steps that come."""
    torch.set_num_threads(1)
    worker = LLMEngine(**settings).client.core.parts.worker
    while (step := steps.take()) is not None:
        outputs.put(worker.compute(step))
