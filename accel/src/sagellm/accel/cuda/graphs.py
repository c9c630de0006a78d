"""CUDA graphs of decodes, one for each number of sequences in a list."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sagellm.accel.cuda.decoder import StepTensors
from sagellm.accel.cuda.paged_attention import (
    AttentionPlan,
    DeviceTiles,
    SequenceRows,
    num_programs,
    split_space,
)
from sagellm.accel.cuda.tiles import SPLIT_TOKENS, Ints, tiles_of
from sagellm.core import AttentionSpec, InputBatch

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of sequences for which there are graphs; other numbers are padded."""

_WARM_UPS = 2
_SCRATCH_ITEMS = 8192
"""Splits that graphs have room for: 256 sequences of 8,192 tokens, say. More run without a graph."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # (bucket, vocab)


class DecodeBuffers:
    """The inputs of decodes at fixed addresses, for up to `num_rows` sequences of `num_blocks` blocks.

    Rows beyond those of a step are padding: they have no tokens, no splits and no slot.
    """

    def __init__(self, num_rows: int, num_blocks: int, spec: AttentionSpec, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.num_rows, self.num_items = num_rows, _SCRATCH_ITEMS
        self._input_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._positions, self._wanted = self._input_ids.clone(), self._input_ids.clone()
        self._slots = torch.full_like(self._input_ids, -1)
        self._tables = ints(num_rows, num_blocks)
        # One piece, so that what the host plans is one copy: lengths, first items, tiles of items.
        self._planned = ints(2 * num_rows + 1 + self.num_items)
        self._staged = torch.zeros_like(self._planned, device="cpu", pin_memory=device.type == "cuda")
        self._is_copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._order = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._firsts, self._ones = ints(num_rows), torch.ones_like(self._order)
        self._space = split_space(self.num_items, 1, spec, device)
        self._num_programs = num_programs(device)

    def fits(self, batch: InputBatch) -> bool:
        """Say whether a step consists of decodes alone, wants logits alone, and fits."""
        num_items = sum(-(-length // SPLIT_TOKENS) for length in batch.seq_lens)
        return (
            batch.hidden is None
            and len(batch.input_ids) == batch.num_seqs <= self.num_rows
            and len(batch.logits_indices) <= batch.num_seqs
            and batch.block_tables.shape[1] <= self._tables.shape[1]
            and num_items <= self.num_items
        )

    def fill(self, batch: InputBatch, bucket: int) -> None:
        """Copy a step into the buffers, and pad it. Waits for nothing but the last step's copy."""
        rows, width = batch.block_tables.shape
        self._input_ids[:rows].copy_(batch.input_ids)
        self._positions[:rows].copy_(batch.position_ids)
        self._slots[:rows].copy_(batch.slot_mapping)
        self._slots[rows:bucket].fill_(-1)
        self._wanted[: len(batch.logits_indices)].copy_(batch.logits_indices)
        self._wanted[len(batch.logits_indices) : bucket].fill_(0)  # an index of a larger step is out of range
        self._tables[:rows, :width].copy_(batch.block_tables)
        self._plan(np.array(batch.seq_lens, np.int32))

    def _plan(self, lengths: Ints) -> None:
        rows, all_rows = len(lengths), self.num_rows
        tiles = tiles_of(
            np.arange(rows, dtype=np.int32),
            np.ones(rows, np.int32),
            lengths,
            tile_tokens=1,
            split=SPLIT_TOKENS,
        )
        num_items = len(tiles.item_tiles)
        if self._is_copied is not None:
            self._is_copied.synchronize()
        staged = self._staged.numpy()
        staged[:rows], staged[rows:all_rows] = lengths, 1
        staged[all_rows : all_rows + rows + 1] = tiles.item_begins
        staged[all_rows + rows + 1 : 2 * all_rows + 1] = num_items
        staged[2 * all_rows + 1 : 2 * all_rows + 1 + num_items] = tiles.item_tiles
        used = 2 * all_rows + 1 + num_items
        self._planned[:used].copy_(self._staged[:used], non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record()

    def clear(self) -> None:
        """Make all rows padding."""
        self._slots.fill_(-1)
        self._wanted.fill_(0)
        self._plan(np.empty(0, np.int32))

    def step(self, bucket: int) -> StepTensors:
        """Return the first rows of the buffers as a step."""
        sizes = [self.num_rows, self.num_rows + 1, self.num_items]
        lengths, begins, items = self._planned.split(sizes)  # type: ignore[no-untyped-call]
        order, firsts = self._order[:bucket], self._firsts[:bucket]
        tiles = DeviceTiles(
            sequences=order,
            firsts=firsts,
            item_tiles=items,
            item_begins=begins,
            num_tiles=bucket,
            num_programs=self._num_programs,
            tile_tokens=1,
            split=SPLIT_TOKENS,
            **self._space,
        )
        rows = SequenceRows(self._tables[:bucket], order, self._ones[:bucket], lengths[:bucket])
        return StepTensors(
            input_ids=self._input_ids[:bucket],
            positions=self._positions[:bucket],
            slots=self._slots[:bucket],
            wanted=self._wanted[:bucket],
            attention=AttentionPlan(rows, (tiles,)),
        )


class DecodeGraphs:
    """Captures a graph when its bucket is first needed, and replays it from then on.

    All graphs share one pool of memory, which is sound because only one of them runs at a time, and because
    their logits are read before the next step is submitted to the same stream.
    """

    def __init__(self, buffers: DecodeBuffers, compute: Callable[[StepTensors], torch.Tensor]) -> None:
        self._buffers, self._compute = buffers, compute
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.num_replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, batch: InputBatch) -> torch.Tensor | None:
        """Return a step's logits, valid until the next call; None if graphs do not take such steps."""
        if not self._buffers.fits(batch):
            return None
        bucket = BUCKETS[bisect_left(BUCKETS, batch.num_seqs)]
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        self._buffers.fill(batch, bucket)
        captured = self._graphs[bucket]
        captured.graph.replay()
        self.num_replays += 1
        return captured.logits[: len(batch.logits_indices)]

    def _capture(self, bucket: int) -> _Graph:
        """Run the step of nothing but padding, to compile its kernels, then record it."""
        self._buffers.clear()
        step = self._buffers.step(bucket)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._compute(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._compute(step)
        return _Graph(graph, logits)
