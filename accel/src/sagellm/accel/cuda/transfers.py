"""Copies of blocks between the device and host memory, on streams of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sagellm.accel.cuda.block_copies import move
from sagellm.core import BlockId

_STAGED_BLOCKS = 8
"""Blocks of a piece, which is gathered by one launch and sent by one copy."""

_KEPT_STEPS = 3


class CudaStreams:
    """Streams and events of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        """Make a stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        """Make an event."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """Return the stream on which steps are computed."""
        return torch.cuda.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Launch and copy on a stream."""
        return torch.cuda.stream(stream)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor until what is launched on a stream is over."""
        tensor.record_stream(stream)


class _Done:
    """A stream, or an event, of a CPU, on which everything is done when the call returns."""

    def wait_event(self, event: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class HostStreams:
    """The same of a CPU, where nothing is waited for."""

    def stream(self) -> Any:
        """Make a stream."""
        return _Done()

    event = current = stream

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Launch and copy as ever."""
        return nullcontext(stream)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing."""


class BlockTransfers:
    """Copies blocks through pinned memory, so that the device reads and writes it while it computes.

    A read waits for its data, and the data for the steps that may have written it and for the copies and
    writes that have: `after_step` and `after_change` note when these are over. A write waits only for the
    copy into pinned memory. Its data travel beside the steps in flight, but into the blocks they go between
    these, which may write there for sequences that have ended, and what is launched next.
    """

    def __init__(self, memory: torch.Tensor, streams: CudaStreams | HostStreams | None = None) -> None:
        is_cuda = memory.device.type == "cuda"
        if streams is None:
            streams = CudaStreams(memory.device) if is_cuda else HostStreams()
        self._memory, self._streams = memory, streams  # (blocks, bytes of a block) uint8
        self._reads, self._writes = streams.stream(), streams.stream()
        num_bytes = memory.shape[1]
        # A piece is copied on by the host while the next one arrives.
        self._gathered = memory.new_empty(_STAGED_BLOCKS, num_bytes)
        self._arriving = torch.empty(2, _STAGED_BLOCKS, num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._have_arrived = [streams.event() for _ in range(2)]
        self._leaving = torch.empty(_STAGED_BLOCKS, num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._have_left = [streams.event() for _ in range(_STAGED_BLOCKS)]
        self._steps: deque[Any] = deque(maxlen=_KEPT_STEPS)  # events after the last steps
        self._changes: dict[BlockId, Any] = {}  # events after which blocks are as copied or written

    def after_step(self) -> None:
        """Note that a step has been launched."""
        self._steps.append(self._recorded(self._streams.current()))

    def after_change(self, block_ids: Sequence[BlockId]) -> None:
        """Note that what has been launched changes blocks."""
        event = self._recorded(self._streams.current())
        self._changes = {block: each for block, each in self._changes.items() if not each.query()}
        self._changes.update(dict.fromkeys(block_ids, event))

    def read(self, block_ids: Sequence[BlockId], into: Sequence[memoryview], num_in_flight: int = 0) -> None:
        """Copy to host memory blocks that the last `num_in_flight` steps do not write."""
        for event in self._writers(block_ids, num_in_flight):
            self._reads.wait_event(event)
        arriving: Sequence[memoryview] = ()
        for number, begin in enumerate(range(0, len(block_ids), _STAGED_BLOCKS)):
            piece = slice(begin, begin + _STAGED_BLOCKS)
            self._send(block_ids[piece], number % 2)
            self._take(arriving, (number - 1) % 2)
            arriving = into[piece]
        self._take(arriving, (len(block_ids) - 1) // _STAGED_BLOCKS % 2)

    def write(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Copy host memory into blocks."""
        if not block_ids:
            return
        with self._streams.use(self._writes):
            arriving = self._memory.new_empty(len(block_ids), self._memory.shape[1])
            for index, source in enumerate(data):
                place = index % _STAGED_BLOCKS
                self._have_left[place].synchronize()
                self._leaving[place].copy_(torch.frombuffer(source, dtype=torch.uint8))
                arriving[index].copy_(self._leaving[place], non_blocking=True)
                self._have_left[place].record(self._writes)
        computing = self._streams.current()
        computing.wait_event(self._recorded(self._writes))
        move(arriving, self._memory, range(len(block_ids)), block_ids)
        self._streams.keep(arriving, computing)
        self.after_change(block_ids)

    def _recorded(self, stream: Any) -> Any:
        event = self._streams.event()
        event.record(stream)
        return event

    def _writers(self, block_ids: Sequence[BlockId], num_in_flight: int) -> list[Any]:
        """Return the events after which blocks are written."""
        steps = list(self._steps)
        last = steps[max(0, len(steps) - 1 - num_in_flight) :][:1]  # of those before, or the oldest known
        changes = [self._changes[block] for block in block_ids if block in self._changes]
        return [*last, *dict.fromkeys(changes)]

    def _send(self, block_ids: Sequence[BlockId], half: int) -> None:
        """Begin to copy blocks to a half of pinned memory."""
        count = len(block_ids)
        with self._streams.use(self._reads):
            move(self._memory, self._gathered, block_ids, range(count))
            self._arriving[half, :count].copy_(self._gathered[:count], non_blocking=True)
            self._have_arrived[half].record(self._reads)

    def _take(self, into: Sequence[memoryview], half: int) -> None:
        """Copy what has arrived in a half to host memory."""
        if into:
            self._have_arrived[half].synchronize()
        for source, target in zip(self._arriving[half], into, strict=False):
            torch.frombuffer(target, dtype=torch.uint8).copy_(source)
