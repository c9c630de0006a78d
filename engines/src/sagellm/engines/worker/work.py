"""The work of the forward passes, counted from the batches: FLOPs, and bytes that must be read."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core import InputBatch, KVLayout, ModelGeometry
from sagellm.core.protocols.attention import HostBatch
from sagellm.engines.metrics.flops import attention_flops, layer_flops, logits_flops


@dataclass(frozen=True, kw_only=True)
class WorkMetrics:
    """FLOPs by the formulas of `sagellm.engines.metrics.flops`, attention counted as causal.

    Bytes that must be read: all weights once per step, and the KV of the batch.
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


class WorkMeter:
    """Adds up the work of steps, with few operations per step."""

    def __init__(self) -> None:
        self._num_steps = self._num_tokens = self._num_logits_rows = 0
        self._num_context_tokens = 0  # for each token, those before it and itself
        self._num_kv_tokens = 0  # for each sequence of a step, all its tokens

    def add(self, batch: InputBatch | HostBatch) -> None:
        """Count a step that was computed."""
        queries, contexts = batch.query_lens, batch.seq_lens
        num_tokens, num_kv_tokens = sum(queries), sum(contexts)
        num_context_tokens = num_kv_tokens
        if num_tokens > len(queries):  # else each sequence has one new token, which sees all its tokens
            pairs = zip(queries, contexts, strict=True)
            num_context_tokens = sum(new * (2 * context - new + 1) for new, context in pairs) // 2
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_kv_tokens += num_kv_tokens
        self._num_context_tokens += num_context_tokens
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
