"""What all attention backends count, and the shapes they refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from sagellm.core import AttentionMetrics, InputBatch, UnsupportedModelError


class StepCounter:
    """Counts steps and query tokens, split by the kind of work."""

    def __init__(self) -> None:
        self._metrics = AttentionMetrics(details={"prefill_tokens": 0, "decode_tokens": 0})

    def add(self, batch: InputBatch) -> None:
        """Count one step."""
        decodes = batch.query_lens.count(1)
        total = sum(batch.query_lens)
        self._metrics.num_steps += 1
        self._metrics.num_query_tokens += total
        self._metrics.details["decode_tokens"] += decodes
        self._metrics.details["prefill_tokens"] += total - decodes

    def metrics(self) -> AttentionMetrics:
        """Return the counts so far."""
        return replace(self._metrics, details=dict(self._metrics.details))


def query_starts(batch: InputBatch) -> list[int]:
    """Return where in the flat batch each sequence's tokens begin."""
    return [0, *accumulate(batch.query_lens)][:-1]


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise UnsupportedModelError unless the query heads divide evenly among the KV heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{num_heads} query heads do not divide among {num_kv_heads} KV heads; each KV head serves "
            f"equally many query heads"
        )
