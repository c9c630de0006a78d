"""Launches attention over paged KV."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch

from sagellm.accel.cuda.attention_kernels import attend, merge_splits
from sagellm.accel.cuda.kernel import compute_type, next_power_of_2
from sagellm.accel.cuda.library_attention import StepAttention
from sagellm.accel.cuda.paged_kv import PagedKV
from sagellm.accel.cuda.support import IS_INTERPRETED
from sagellm.accel.cuda.tiles import Ints, Tiles, plan_tiles, upload
from sagellm.core import AttentionSpec

_PROGRAMS_PER_PROCESSOR = 8
"""Programs that walk through the items of a step, for each multiprocessor."""


@dataclass(frozen=True)
class SequenceRows:
    """The sequences of a step on the device; all but the tables (sequences,)."""

    tables: torch.Tensor  # (sequences, blocks of the longest)
    row_begins: torch.Tensor
    num_new: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class DeviceTiles:
    """Tiles on the device, and the space for their splits."""

    sequences: torch.Tensor
    firsts: torch.Tensor
    item_tiles: torch.Tensor
    item_begins: torch.Tensor
    num_tiles: int
    num_programs: int
    tile_tokens: int
    split: int
    partial: torch.Tensor  # (items * heads * tile tokens, D) float32
    partial_stats: torch.Tensor  # (items * heads * tile tokens, 2) float32


@dataclass(frozen=True)
class AttentionPlan(StepAttention):
    """Tiles of our own kernels."""

    rows: SequenceRows
    tiles: tuple[DeviceTiles, ...]

    def run(self, query: torch.Tensor, kv: PagedKV, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """Launch the tiles."""
        out = torch.empty_like(query)
        for tiles in self.tiles:
            _run_tiles(query, kv, layer, spec, self.rows, tiles, out)
        return out


def plan_attention(tables: torch.Tensor, num_new: Ints, lengths: Ints, spec: AttentionSpec) -> AttentionPlan:
    """Plan a step whose sequences have these numbers of rows and tokens; one copy to the device."""
    device = tables.device
    plan = plan_tiles(num_new, lengths, spec.num_heads // spec.num_kv_heads)
    arrays = [np.cumsum(num_new, dtype=np.int32) - num_new, num_new, lengths]
    for each in plan:
        arrays += [each.sequences, each.firsts, each.item_tiles, each.item_begins]
    begins, counts, ends, *parts = upload(arrays, device)
    tiles = [
        _device_tiles(each, parts[4 * place : 4 * place + 4], spec, device) for place, each in enumerate(plan)
    ]
    return AttentionPlan(SequenceRows(tables, begins, counts, ends), tuple(tiles))


def _device_tiles(
    tiles: Tiles, parts: list[torch.Tensor], spec: AttentionSpec, device: torch.device
) -> DeviceTiles:
    sequences, firsts, item_tiles, item_begins = parts
    num_items = len(tiles.item_tiles)
    most = num_programs(device) if tiles.split else num_items
    return DeviceTiles(
        sequences=sequences,
        firsts=firsts,
        item_tiles=item_tiles,
        item_begins=item_begins,
        num_tiles=len(tiles.sequences),
        num_programs=min(num_items, most),
        tile_tokens=tiles.tile_tokens,
        split=tiles.split,
        **split_space(num_items if tiles.split else 0, tiles.tile_tokens, spec, device),
    )


def split_space(
    num_items: int, tile_tokens: int, spec: AttentionSpec, device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate the results of this many splits."""
    num_rows = num_items * spec.num_heads * tile_tokens
    return {
        "partial": torch.empty(num_rows, spec.head_dim, device=device),
        "partial_stats": torch.empty(num_rows, 2, device=device),
    }


@cache
def num_programs(device: torch.device) -> int:
    """Return how many programs share the items of a step."""
    if IS_INTERPRETED:
        return 3
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _run_tiles(  # noqa: PLR0913
    query: torch.Tensor,
    kv: PagedKV,
    layer: int,
    spec: AttentionSpec,
    rows: SequenceRows,
    tiles: DeviceTiles,
    out: torch.Tensor,
) -> None:
    group = spec.num_heads // spec.num_kv_heads
    block_m = max(16, next_power_of_2(tiles.tile_tokens * group))
    block_d = next_power_of_2(spec.head_dim)
    shape = {
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": group,
        "TILE_TOKENS": tiles.tile_tokens,
        "BLOCK_M": block_m,
        "D": spec.head_dim,
        "BLOCK_D": max(16, block_d),
        "SPLIT": tiles.split,
        "WINDOW": spec.sliding_window or 0,
    }
    of_tiles = {"tile_sequences": tiles.sequences, "tile_firsts": tiles.firsts}
    of_rows = {"row_begins": rows.row_begins, "num_new": rows.num_new, "lengths": rows.lengths}
    attend[(tiles.num_programs, spec.num_kv_heads)](
        query,
        kv.values,
        kv.scales,
        rows.tables,
        item_tiles=tiles.item_tiles,
        item_begins=tiles.item_begins,
        num_tiles=tiles.num_tiles,
        out=out,
        partial=tiles.partial,
        partial_stats=tiles.partial_stats,
        table_stride=rows.tables.stride(0),
        scale=spec.scale,
        BLOCK_N=64 if block_d <= 128 else 32,
        BLOCK_SIZE=kv.layout.block_size,
        SOFT_CAP=spec.soft_cap or 0.0,
        IS_SCALED=bool(kv.scaled_max),
        COMPUTE=compute_type(query.dtype),
        num_warps=8 if block_m >= 128 else 4,
        num_stages=2,
        **of_tiles,
        **of_rows,
        **asdict(kv.place(layer)),
        **shape,
    )
    if tiles.split:
        merge_splits[(tiles.num_tiles, spec.num_kv_heads)](
            tiles.partial,
            tiles.partial_stats,
            item_begins=tiles.item_begins,
            out=out,
            num_warps=4,
            **of_tiles,
            **of_rows,
            **shape,
        )
