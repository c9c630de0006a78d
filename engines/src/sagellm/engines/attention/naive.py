"""The reference: attention as its formula is written, one sequence after another, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagellm.core import AttentionBackendProtocol, AttentionMetrics, AttentionSpec, InputBatch
from sagellm.engines.attention.counting import StepCounter, check_heads, query_starts
from sagellm.engines.attention.kv_cache import reshape_and_cache_kv


def create_causal_mask(
    query_len: int, seq_len: int, sliding_window: int | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return which keys each query sees, (query_len, seq_len) bool; queries are the last tokens.

    A query sees itself and what comes before it; with a window only `sliding_window - 1` of those.
    """
    queries = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)[None, :]
    visible = keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    return visible


def naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return softmax(query @ key.T * scale) @ value in float32.

    `query` is (queries, heads, dim), `key` and `value` (keys, kv_heads, dim), `mask` (queries,
    keys), true where a query sees a key. Neighbouring query heads share a KV head.
    """
    group = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(group, dim=1)
    value = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@dataclass(frozen=True)
class _Plan:
    batch: InputBatch
    starts: list[int]


class TorchNaiveBackend(AttentionBackendProtocol):
    """What every other backend is compared with. Slow, and easy to read."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        check_heads(num_heads, num_kv_heads)
        self._block_size = block_size
        self._counter = StepCounter()

    def plan(self, batch: InputBatch) -> object:
        """Record where each sequence's tokens begin."""
        self._counter.add(batch)
        return _Plan(batch, query_starts(batch))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        plan: object,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Write the new KV, then attend for each sequence over all of its KV."""
        assert isinstance(plan, _Plan), "forward takes what plan returned"
        batch = plan.batch
        reshape_and_cache_kv(key, value, layer_kv, batch.slot_mapping)
        out = torch.empty_like(query)
        for i, (start, length, seq_len) in enumerate(
            zip(plan.starts, batch.query_lens, batch.seq_lens, strict=True)
        ):
            positions = torch.arange(seq_len, device=query.device)
            blocks = batch.block_tables[i, positions // self._block_size]
            stored = layer_kv[blocks, :, :, positions % self._block_size]  # (tokens, 2, kv_heads, dim)
            mask = create_causal_mask(length, seq_len, spec.sliding_window, query.device)
            rows = slice(start, start + length)
            out[rows] = naive_attention(query[rows], stored[:, 0], stored[:, 1], mask, spec.scale).to(
                out.dtype
            )
        return out

    def metrics(self) -> AttentionMetrics:
        """Return the counts so far."""
        return self._counter.metrics()
