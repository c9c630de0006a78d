"""Copies of blocks between the device and host memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sagellm.core import BlockId

_STAGED_BLOCKS = 8


class BlockTransfers:
    """Copies blocks through pinned memory, so that the device reads and writes it while it computes.

    Reads wait for their data, writes only for the copy into pinned memory; what is computed next waits for
    both on the device. On a CPU all copies are plain.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # (blocks, bytes of a block) uint8
        self._is_cuda = memory.device.type == "cuda"
        if self._is_cuda:
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
            shape = (_STAGED_BLOCKS, memory.shape[1])
            self._staging = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            self._are_free = [
                torch.cuda.Event()  # type: ignore[no-untyped-call]
                for _ in range(_STAGED_BLOCKS)
            ]

    def read(self, block_ids: Sequence[BlockId], into: Sequence[memoryview]) -> None:
        """Copy blocks to host memory."""
        targets = [torch.frombuffer(each, dtype=torch.uint8) for each in into]
        if not self._is_cuda:
            for block_id, target in zip(block_ids, targets, strict=True):
                target.copy_(self._memory[block_id])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        for begin in range(0, len(block_ids), _STAGED_BLOCKS):
            batch = range(begin, min(begin + _STAGED_BLOCKS, len(block_ids)))
            with torch.cuda.stream(self._stream):
                for place, index in enumerate(batch):
                    self._staging[place].copy_(self._memory[block_ids[index]], non_blocking=True)
                    self._are_free[place].record(self._stream)
            for place, index in enumerate(batch):  # the first is copied on while the others arrive
                self._are_free[place].synchronize()
                targets[index].copy_(self._staging[place])

    def write(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Copy host memory into blocks."""
        sources = [torch.frombuffer(each, dtype=torch.uint8) for each in data]
        if not self._is_cuda:
            for block_id, source in zip(block_ids, sources, strict=True):
                self._memory[block_id].copy_(source)
            return
        computing = torch.cuda.current_stream(self._memory.device)
        self._stream.wait_stream(computing)  # steps in flight may still read what these blocks held
        for index, (block_id, source) in enumerate(zip(block_ids, sources, strict=True)):
            place = index % _STAGED_BLOCKS
            self._are_free[place].synchronize()
            self._staging[place].copy_(source)
            with torch.cuda.stream(self._stream):
                self._memory[block_id].copy_(self._staging[place], non_blocking=True)
                self._are_free[place].record(self._stream)
        computing.wait_stream(self._stream)
