"""Writing KV into its blocks and reading it back."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch


class Slots(NamedTuple):
    """Where the KV of a step's tokens goes."""

    block_ids: torch.Tensor  # (tokens,)
    offsets: torch.Tensor  # (tokens,)

    @classmethod
    def of(cls, slot_mapping: torch.Tensor, block_size: int) -> Slots:
        """Split slots (block id * block_size + offset) once for all layers."""
        block_ids = torch.div(slot_mapping, block_size, rounding_mode="floor")
        return cls(block_ids, slot_mapping - block_ids * block_size)


def write_kv(key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slots: Slots) -> None:
    """Write key and value (tokens, kv_heads, dim) into layer_kv (blocks, 2, kv_heads, block_size, dim)."""
    layer_kv[:, 0].transpose(1, 2)[slots] = key
    layer_kv[:, 1].transpose(1, 2)[slots] = value


def reshape_and_cache_kv(
    key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write key and value (tokens, kv_heads, dim) to the slots (tokens,) of one layer's KV.

    `layer_kv` is (blocks, 2, kv_heads, block_size, dim), any strides. Writing twice is the same
    as writing once.
    """
    write_kv(key, value, layer_kv, Slots.of(slot_mapping, layer_kv.shape[3]))


class HeadRows:
    """One layer's KV viewed as rows that a single gather can copy in the order attention needs.

    Gathering whole blocks would put the heads of a block side by side and require a second copy. Row by row,
    a sequence's keys and values come out as (2, kv_heads, tokens, dim). A row is one head's part of one
    block, or a fraction of it if blocks are padded to an odd stride.
    """

    def __init__(self, num_kv_heads: int, block_size: int, head_dim: int, block_stride: int) -> None:
        head_size = block_size * head_dim
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.row_size = gcd(head_size, block_stride)
        self.rows_per_block = block_stride // self.row_size
        self.rows_per_head = head_size // self.row_size

    def index(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Return the row numbers of tables (sequences, blocks).

        The result is (sequences, 2 * kv_heads, blocks, rows of a head).
        """
        device = block_tables.device
        heads = torch.arange(2 * self.num_kv_heads, device=device) * self.rows_per_head
        parts = torch.arange(self.rows_per_head, device=device)
        blocks = block_tables[:, None, :, None] * self.rows_per_block
        return blocks + heads[None, :, None, None] + parts

    def gather(self, layer_kv: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Copy what `index` (2 * kv_heads, blocks, rows of a head) names: (2, kv_heads, tokens, dim)."""
        num_rows = (layer_kv.shape[0] - 1) * self.rows_per_block + 2 * self.num_kv_heads * self.rows_per_head
        rows = layer_kv.as_strided((num_rows, self.row_size), (self.row_size, 1), layer_kv.storage_offset())
        return rows.index_select(0, index.reshape(-1)).view(2, self.num_kv_heads, -1, self.head_dim)
