"""The work of the forward passes, counted from the batches: FLOPs, and bytes that must be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sagellm.core import InputBatch, KVLayout, ModelGeometry
from sagellm.core.protocols.attention import HostBatch
from sagellm.core.protocols.forward import Operation, OperationWeights
from sagellm.engines.metrics.flops import (
    attention_flops,
    logits_flops,
    mlp_flops,
    output_flops,
    qkv_flops,
)


@dataclass(frozen=True, kw_only=True)
class WorkMetrics:
    """FLOPs by the formulas of `sagellm.engines.metrics.flops`, attention counted as causal.

    Bytes that must be read: all weights once per step, and the KV of the batch. Layers with a sliding window
    attend to it alone.
    """

    num_steps: int = 0
    num_tokens: int = 0
    flops: int = 0
    read_bytes: int = 0

    def __sub__(self, earlier: WorkMetrics) -> WorkMetrics:
        """Return the difference from an earlier reading."""
        return WorkMetrics(
            num_steps=self.num_steps - earlier.num_steps,
            num_tokens=self.num_tokens - earlier.num_tokens,
            flops=self.flops - earlier.flops,
            read_bytes=self.read_bytes - earlier.read_bytes,
        )


class WorkCounts(NamedTuple):
    """What steps computed, whatever the shape of the model; tokens of attention are means of its layers."""

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_logits_rows: int = 0
    num_logits_steps: int = 0  # steps with any: others need no head
    num_context_tokens: float = 0  # for each token, those that it attends to: before it, and itself
    num_kv_tokens: float = 0  # for each sequence of a step, those whose KV is read

    def plus(self, other: WorkCounts, sign: int = 1) -> WorkCounts:
        """Return the sum, or the difference if the sign is -1."""
        return WorkCounts(*(one + sign * each for one, each in zip(self, other, strict=True)))  # type: ignore[arg-type]


class OperationWork(NamedTuple):
    """FLOPs of an operation, and the bytes of weights and KV that it must read."""

    flops: float
    read_bytes: float


def work_by_operation(
    counts: WorkCounts,
    geometry: ModelGeometry,
    layout: KVLayout,
    weights: Mapping[Operation, OperationWeights],
) -> dict[Operation, OperationWork]:
    """Return the work of the operations that have any, for a model of this shape.

    FLOPs are those of `sagellm.engines.metrics.flops`. Of weights whose bytes are unknown none are counted.
    """
    num_layers, num_tokens = geometry.num_layers, counts.num_tokens
    flops: dict[Operation, float] = {
        "qkv": num_layers * num_tokens * qkv_flops(geometry),
        "attend": num_layers * attention_flops(geometry, 1) * counts.num_context_tokens,
        "output": num_layers * num_tokens * output_flops(geometry),
        "gate_up": num_layers * num_tokens * (mlp_flops(geometry) * 2 // 3),
        "down": num_layers * num_tokens * (mlp_flops(geometry) // 3),
        "head": logits_flops(geometry, counts.num_logits_rows),
    }
    num_reads = dict.fromkeys(flops, counts.num_steps) | {"head": counts.num_logits_steps}
    read_bytes = {name: num_reads[name] * each.num_bytes for name, each in weights.items()}
    kv_bytes = counts.num_kv_tokens * layout.block_bytes / layout.block_size
    return {
        name: OperationWork(each, kv_bytes if name == "attend" else read_bytes.get(name, 0))
        for name, each in flops.items()
    }


class WorkMeter:
    """Adds up the work of steps, with few operations per step.

    `windows` has the sliding window of each layer, None where it attends to all; without it none has any.
    """

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        self._shares = {window: count / len(windows) for window, count in Counter(windows).items()}
        self.counts = WorkCounts()

    def add(self, batch: InputBatch | HostBatch) -> None:
        """Count a step that was computed."""
        queries, contexts = batch.query_lens, batch.seq_lens
        num_logits_rows = len(batch.logits_indices)
        num_context_tokens = num_kv_tokens = 0.0
        for window, share in self._shares.items():
            attended, read = _attended(queries, contexts, window)
            num_context_tokens += share * attended
            num_kv_tokens += share * read
        step = WorkCounts(
            num_steps=1,
            num_sequences=len(queries),
            num_tokens=sum(queries),
            num_logits_rows=num_logits_rows,
            num_logits_steps=int(num_logits_rows > 0),
            num_context_tokens=num_context_tokens,
            num_kv_tokens=num_kv_tokens,
        )
        self.counts = self.counts.plus(step)

    def metrics(self, geometry: ModelGeometry, layout: KVLayout, weight_bytes: int) -> WorkMetrics:
        """Return the work so far, for a model of this shape."""
        operations = work_by_operation(self.counts, geometry, layout, {})
        return WorkMetrics(
            num_steps=self.counts.num_steps,
            num_tokens=self.counts.num_tokens,
            flops=round(sum(each.flops for each in operations.values())),
            read_bytes=self.counts.num_steps * weight_bytes + round(operations["attend"].read_bytes),
        )


def _attended(queries: Sequence[int], contexts: Sequence[int], window: int | None) -> tuple[int, int]:
    """Return how many tokens the new ones attend to, and of how many the KV is read."""
    if window is None:
        num_read = sum(contexts)
        if sum(queries) == len(queries):  # each sequence has one new token, which sees all its tokens
            return num_read, num_read
        pairs = zip(queries, contexts, strict=True)
        return sum(new * (2 * context - new + 1) for new, context in pairs) // 2, num_read
    attended = read = 0
    for new, context in zip(queries, contexts, strict=True):
        num_whole = min(max(window - (context - new), 0), new)  # new tokens that see all before them
        attended += num_whole * (2 * (context - new) + num_whole + 1) // 2 + (new - num_whole) * window
        read += min(context, window + new - 1)
    return attended, read
