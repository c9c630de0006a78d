"""The work of the forward passes, counted from the batches: FLOPs, and bytes that must be read."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core import (
    InputBatch,
    KVLayout,
    ModelGeometry,
    attention_flops,
    layer_flops,
    logits_flops,
)


@dataclass(frozen=True, kw_only=True)
class WorkMetrics:
    """FLOPs by the formulas of `sagellm.core.metrics.flops`, attention counted as causal.

    Bytes that must be read: all weights once per step, and the KV of the batch.
    """

    num_steps: int = 0
    num_tokens: int = 0
    flops: int = 0
    read_bytes: int = 0


class WorkMeter:
    """Adds up the work of steps, with a few numpy calls per step."""

    def __init__(self) -> None:
        self._num_steps = self._num_tokens = self._num_logits_rows = 0
        self._num_context_tokens = 0  # for each token, those before it and itself
        self._num_kv_tokens = 0  # for each sequence of a step, all its tokens

    def add(self, batch: InputBatch) -> None:
        """Count a step that was computed."""
        import numpy as np  # commands that read these metrics load none

        queries, contexts = np.array(batch.query_lens), np.array(batch.seq_lens)
        self._num_steps += 1
        self._num_tokens += int(queries.sum())
        self._num_context_tokens += int((queries * (2 * contexts - queries + 1)).sum()) // 2
        self._num_kv_tokens += int(contexts.sum())
        self._num_logits_rows += len(batch.logits_indices)

    def metrics(self, geometry: ModelGeometry, layout: KVLayout, weight_bytes: int) -> WorkMetrics:
        """Return the counts so far, for a model of this shape."""
        layers = self._num_tokens * layer_flops(geometry, 0)
        layers += attention_flops(geometry, self._num_context_tokens)
        kv_bytes = self._num_kv_tokens * layout.block_bytes // layout.block_size
        return WorkMetrics(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            flops=geometry.num_layers * layers + logits_flops(geometry, self._num_logits_rows),
            read_bytes=self._num_steps * weight_bytes + kv_bytes,
        )
