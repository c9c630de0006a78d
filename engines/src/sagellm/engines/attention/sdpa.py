"""Attention through torch's scaled_dot_product_attention, the default on every device.

Each sequence is attended to on its own, so that its result does not depend on its neighbours:

- decode, one query: its KV is gathered from its blocks; the query heads that share a KV head are
  passed as if they were that many queries, so KV is never expanded. One padded call for the whole
  batch is slower on a CPU, most of all where lengths differ, and would read stale slots.
- the first tokens of a prompt: keys and values are at hand, so nothing is gathered.
- later tokens of a prompt: gathered, with an explicit mask, a tile of queries at a time.

On a CPU all of it is computed in float32. torch's kernel for 16-bit inputs rounds the softmax to 16
bits, so that a token's output differs between these three ways, and with it what a preempted or
cached prompt generates; in float32 they round to the same (docs/decisions/0006).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from sagellm.core import AttentionBackendProtocol, AttentionMetrics, AttentionSpec, InputBatch
from sagellm.engines.attention.counting import StepCounter, check_heads, query_starts
from sagellm.engines.attention.kv_cache import HeadRows, Slots, write_kv
from sagellm.engines.attention.naive import create_causal_mask

_TILE_QUERIES = 512
_TILE_ELEMENTS = 1 << 22
"""Largest mask of one call, in elements: bounds the memory for a long chunk over a long context."""


@dataclass(frozen=True)
class _Span:
    """One sequence's tokens in the flat batch."""

    row: int  # in the block tables
    start: int
    query_len: int
    seq_len: int


class _Plan:
    """What the layers of a step share; masks and row numbers are built when first needed."""

    def __init__(self, spans: list[_Span], slots: Slots, block_tables: torch.Tensor) -> None:
        self.spans = spans
        self.slots = slots
        self._block_tables = block_tables
        self._rows: HeadRows | None = None
        self._row_index = block_tables  # replaced together with _rows
        self._gather_indices: dict[tuple[int, int], torch.Tensor] = {}
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}
        self._num_mask_elements = 0

    def gather(
        self, layer_kv: torch.Tensor, span: _Span, first_block: int
    ) -> torch.Tensor:  # (2, kv_heads, tokens, dim)
        """Copy a sequence's KV from the given block to its last; the end of the last block is stale."""
        _, _, num_kv_heads, block_size, head_dim = layer_kv.shape
        if self._rows is None:
            self._rows = HeadRows(num_kv_heads, block_size, head_dim, layer_kv.stride(0))
            self._row_index = self._rows.index(self._block_tables)
        key = (span.row, first_block)
        index = self._gather_indices.get(key)
        if index is None:
            num_blocks = -(-span.seq_len // block_size)
            index = self._row_index[span.row, :, first_block:num_blocks].reshape(-1)
            self._gather_indices[key] = index
        return self._rows.gather(layer_kv, index)

    def mask(self, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
        """Return the causal mask of the last `num_queries` of `num_keys` tokens."""
        key = (num_queries, num_keys, window)
        mask = self._masks.get(key)
        if mask is None:
            if self._num_mask_elements > _TILE_ELEMENTS:
                self._masks.clear()
                self._num_mask_elements = 0
            mask = create_causal_mask(num_queries, num_keys, window, self._block_tables.device)
            self._masks[key] = mask
            self._num_mask_elements += mask.numel()
        return mask


class SDPABackend(AttentionBackendProtocol):
    """Scaled dot product attention over paged KV, in torch operators alone."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        check_heads(num_heads, num_kv_heads)
        self._group = num_heads // num_kv_heads
        self._block_size = block_size
        self._counter = StepCounter()

    def plan(self, batch: InputBatch) -> object:
        """Cut the batch into sequences and resolve their slots."""
        self._counter.add(batch)
        starts = query_starts(batch)
        spans = [
            _Span(row, start, query_len, seq_len)
            for row, (start, query_len, seq_len) in enumerate(
                zip(starts, batch.query_lens, batch.seq_lens, strict=True)
            )
        ]
        return _Plan(spans, Slots.of(batch.slot_mapping, self._block_size), batch.block_tables)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        plan: object,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Write the new KV, then attend for each sequence."""
        assert isinstance(plan, _Plan), "forward takes what plan returned"
        write_kv(key, value, layer_kv, plan.slots)
        out = query.new_empty(query.shape)
        for span in plan.spans:
            if span.query_len == 1:
                self._decode(query, out, layer_kv, plan, span, spec)
            else:
                rows = slice(span.start, span.start + span.query_len)
                if span.query_len == span.seq_len:
                    keys = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
                else:
                    keys = self._read(layer_kv, plan, span, spec.sliding_window)
                self._prefill(query[rows], out[rows], keys, plan, spec)
        return out

    def metrics(self) -> AttentionMetrics:
        """Return the counts so far."""
        return self._counter.metrics()

    def _read(
        self, layer_kv: torch.Tensor, plan: _Plan, span: _Span, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the sequence's queries can see, keys and values (kv_heads, tokens, dim)."""
        first_key = 0 if window is None else max(0, span.seq_len - span.query_len + 1 - window)
        first_block = first_key // self._block_size
        stored = plan.gather(layer_kv, span, first_block)
        base = first_block * self._block_size
        seen = stored[:, :, first_key - base : span.seq_len - base]
        return seen[0], seen[1]

    def _decode(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        layer_kv: torch.Tensor,
        plan: _Plan,
        span: _Span,
        spec: AttentionSpec,
    ) -> None:
        key, value = self._read(layer_kv, plan, span, spec.sliding_window)
        grouped = _widened(query[span.start]).view(1, key.shape[0], self._group, key.shape[2])
        result = functional.scaled_dot_product_attention(
            grouped, _widened(key)[None], _widened(value)[None], scale=spec.scale
        )
        out[span.start] = result.view(-1, key.shape[2])

    def _prefill(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        plan: _Plan,
        spec: AttentionSpec,
    ) -> None:
        # Heads as (kv_heads, group): KV is viewed once per head of a group, with stride 0.
        key, value = (_widened(part)[:, None].expand(-1, self._group, -1, -1) for part in keys)
        num_queries, num_keys, window = len(query), key.shape[2], spec.sliding_window
        attend = functional.scaled_dot_product_attention
        shape = (num_queries, key.shape[0], self._group, key.shape[3])
        grouped = _widened(query).view(shape).permute(1, 2, 0, 3)  # (kv_heads, group, queries, dim)
        target = out.view(shape).permute(1, 2, 0, 3)
        if num_queries == num_keys and (window is None or num_keys <= window):
            target.copy_(attend(grouped, key, value, is_causal=True, scale=spec.scale))
            return
        tile = min(_TILE_QUERIES, max(1, _TILE_ELEMENTS // num_keys))
        for begin in range(0, num_queries, tile):
            end = min(begin + tile, num_queries)
            last_key = num_keys - num_queries + end
            first_key = 0 if window is None else max(0, last_key - (end - begin) + 1 - window)
            result = attend(
                grouped[:, :, begin:end],
                key[:, :, first_key:last_key],
                value[:, :, first_key:last_key],
                attn_mask=plan.mask(end - begin, last_key - first_key, window),
                scale=spec.scale,
            )
            target[:, :, begin:end].copy_(result)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype in which attention is computed."""
    return tensor.float() if tensor.device.type == "cpu" else tensor
