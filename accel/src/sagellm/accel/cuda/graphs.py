"""CUDA graphs of the layers, one for each size to which steps are padded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from sagellm.accel.cuda.buckets import Bucket
from sagellm.accel.cuda.decoder import StepTensors
from sagellm.accel.cuda.paged_attention import AttentionPlan, launches_of, planned_arrays
from sagellm.accel.cuda.tiles import Ints, plan_all_tiles, scratch_size
from sagellm.accel.uploads import on_host, pack, packed_length, unpack
from sagellm.core import AttentionSpec, InputBatch

Compute: TypeAlias = Callable[[], object]
Capture: TypeAlias = Callable[[Compute], Callable[[], None]]
"""Records what a function launches, and returns what launches it again."""

_WARM_UPS = 2


class GraphMemory:
    """Captures graphs whose intermediate results share memory, as only one of them runs at a time.

    All are captured on one stream, for which cuBLAS keeps one workspace.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, compute: Compute) -> Callable[[], None]:
        """Run a function, which compiles its kernels, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            compute()
        return graph.replay


class GraphBuffers:
    """What all graphs read and write, at fixed addresses. At first a step of nothing but padding.

    Rows of padding belong to no sequence and have no slot, so nothing is stored or attended to for them.
    """

    def __init__(
        self, buckets: Sequence[Bucket], num_blocks: int, spec: AttentionSpec, last: torch.Tensor
    ) -> None:
        """Create it for sequences of this many blocks; `last` (rows, hidden) is for the layers' result."""
        device, self.last = last.device, last
        num_seqs = max(each.num_seqs for each in buckets)
        num_planned = max(packed_length(each.lengths, 4) for each in buckets)
        self._spec = spec
        self._ids, self._positions, self._slots = torch.zeros(3, len(last), dtype=torch.int64, device=device)
        self._slots.fill_(-1)
        self._tables = torch.zeros(num_seqs, num_blocks, dtype=torch.int64, device=device)
        self._planned = torch.zeros(num_planned, dtype=torch.int32, device=device)
        num_values = max(scratch_size(counts, spec) for each in buckets for counts in each.launches)
        self._scratch = torch.empty(num_values, device=device)

    @property
    def num_bytes(self) -> int:
        """The memory of all of them."""
        held = self.last, self._ids, self._positions, self._slots, self._tables, self._planned, self._scratch
        return sum(each.nbytes for each in held)

    def step(self, bucket: Bucket) -> StepTensors:
        """Return the part of the buffers that a bucket's graph reads."""
        arrays = unpack(self._planned, bucket.lengths)
        launches = launches_of(arrays, bucket.launches, self._tables, self._scratch, self._spec)
        ids, positions, slots = (
            each[: bucket.num_rows] for each in (self._ids, self._positions, self._slots)
        )
        return StepTensors(ids, positions, slots, AttentionPlan(launches))

    def fill(self, batch: InputBatch, bucket: Bucket) -> bool:
        """Copy a step into the buffers, padded, unless it does not fit. Waits for nothing."""
        lengths = np.array(batch.seq_lens, np.int32)
        num_new = np.array(batch.query_lens, np.int32)
        num_seqs, width = batch.block_tables.shape
        planned = self._plan(num_new, lengths, bucket)
        if planned is None or num_seqs > bucket.num_seqs or width > self._tables.shape[1]:
            return False
        rows = len(batch.input_ids)
        torch._foreach_copy_(
            [self._ids[:rows], self._positions[:rows], self._slots[:rows]],
            [batch.input_ids, batch.position_ids, batch.slot_mapping],
        )
        self._tables[:num_seqs, :width].copy_(batch.block_tables)
        if rows < bucket.num_rows:
            self._slots[rows : bucket.num_rows].fill_(-1)
        self._planned[: len(planned)].copy_(on_host(planned, self._planned.device), non_blocking=True)
        return True

    def _plan(self, num_new: Ints, lengths: Ints, bucket: Bucket) -> Ints | None:
        group = self._spec.num_heads // self._spec.num_kv_heads
        tiles = plan_all_tiles(num_new, lengths, group)[: len(bucket.launches)]
        padded = bucket.padded(planned_arrays(num_new, lengths, tiles), tiles)
        return None if padded is None else pack(padded)


class _Graph(NamedTuple):
    bucket: Bucket
    replay: Callable[[], None]


class StepGraphs:
    """Graphs of steps that decode one token of each sequence, and of all others."""

    def __init__(self, buffers: GraphBuffers, decodes: Sequence[Bucket], others: Sequence[Bucket]) -> None:
        self._buffers, self._buckets = buffers, (decodes, others)
        self._decodes: list[_Graph] = []
        self._others: list[_Graph] = []
        self.num_replays = 0

    def __len__(self) -> int:
        return len(self._decodes) + len(self._others)

    def capture(self, run_layers: Callable[[StepTensors, torch.Tensor], object], capture: Capture) -> None:
        """Capture all of them; `run_layers` writes the result of a step to a tensor (rows, hidden)."""
        self._others, self._decodes = (
            [self._captured(bucket, run_layers, capture) for bucket in reversed(buckets)][::-1]
            for buckets in reversed(self._buckets)  # the largest first, whose memory the others use
        )

    def _captured(
        self, bucket: Bucket, run_layers: Callable[[StepTensors, torch.Tensor], object], capture: Capture
    ) -> _Graph:
        step, last = self._buffers.step(bucket), self._buffers.last[: bucket.num_rows]
        return _Graph(bucket, capture(lambda: run_layers(step, last)))

    def run(self, batch: InputBatch) -> torch.Tensor | None:
        """Return what the layers make of a step (rows, hidden) until the next call; None if none fits it."""
        rows = len(batch.input_ids)
        is_decode = rows == batch.num_seqs
        graphs = self._decodes if is_decode and self._decodes else self._others
        place = bisect_left(graphs, rows, key=lambda graph: graph.bucket.num_rows)
        if place == len(graphs) or not self._buffers.fill(batch, graphs[place].bucket):
            return None
        graphs[place].replay()
        self.num_replays += 1
        return self._buffers.last[:rows]
