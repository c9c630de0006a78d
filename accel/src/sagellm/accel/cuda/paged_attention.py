"""Launches attention over paged KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
import torch

from sagellm.accel.cuda.attention_kernels import attend, merge_splits
from sagellm.accel.cuda.kernel import compute_type, next_power_of_2
from sagellm.accel.cuda.library_attention import StepAttention
from sagellm.accel.cuda.paged_kv import LayerKV, PagedKV
from sagellm.accel.cuda.support import IS_INTERPRETED
from sagellm.accel.cuda.tiles import Ints, TileCounts, Tiles, plan_tiles, scratch_size
from sagellm.accel.uploads import upload
from sagellm.core import AttentionSpec

_PROGRAMS_PER_PROCESSOR = 8
"""Programs that walk through the items of a step, for each multiprocessor."""


def layer_kv(kv: PagedKV, layer: int, spec: AttentionSpec, dtype: torch.dtype) -> LayerKV:
    """Return what all steps' attention of a layer has in common; `dtype` is that of queries."""
    block_d = next_power_of_2(spec.head_dim)
    merge = {
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP": spec.num_heads // spec.num_kv_heads,
        "D": spec.head_dim,
        "BLOCK_D": max(16, block_d),
        "WINDOW": spec.sliding_window or 0,
    }
    attend = {
        "kv": kv.values,
        "kv_scales": kv.scales,
        "scale": spec.scale,
        "BLOCK_N": 64 if block_d <= 128 else 32,
        "BLOCK_SIZE": kv.layout.block_size,
        "SOFT_CAP": spec.soft_cap or 0.0,
        "IS_SCALED": bool(kv.scaled_max),
        "COMPUTE": compute_type(dtype),
        "num_stages": 2,
        **kv.place(layer),
        **merge,
    }
    return LayerKV(spec, kv.views(layer), attend, merge)


@dataclass(frozen=True)
class TileLaunch:
    """A launch of each layer, and one that merges its splits, if there are any."""

    attend_grid: tuple[int, int]
    attend: Mapping[str, Any]
    merge_grid: tuple[int, int]
    merge: Mapping[str, Any] | None


@dataclass(frozen=True)
class AttentionPlan(StepAttention):
    """Launches of our own kernels."""

    launches: tuple[TileLaunch, ...]

    def run(self, query: torch.Tensor, layer: LayerKV) -> torch.Tensor:
        """Launch them."""
        out = torch.empty_like(query)
        for each in self.launches:
            attend[each.attend_grid](query, out=out, **each.attend, **layer.attend)
            if each.merge is not None:
                merge_splits[each.merge_grid](out=out, **each.merge, **layer.merge)
        return out


def plan_attention(tables: torch.Tensor, num_new: Ints, lengths: Ints, spec: AttentionSpec) -> AttentionPlan:
    """Plan a step whose sequences have these numbers of rows and tokens; one copy to the device."""
    tiles = plan_tiles(num_new, lengths, spec.num_heads // spec.num_kv_heads)
    counts = [each.counts for each in tiles]
    arrays = upload(planned_arrays(num_new, lengths, tiles), tables.device)
    scratch = torch.empty(max(map(scratch_size, counts, repeat(spec)), default=0), device=tables.device)
    return AttentionPlan(launches_of(arrays, counts, tables, scratch, spec))


def planned_arrays(num_new: Ints, lengths: Ints, tiles: Sequence[Tiles]) -> list[Ints]:
    """Return what the launches of a step read, but for the tables: by sequence, then by launch."""
    arrays = [np.cumsum(num_new, dtype=np.int32) - num_new, num_new, lengths]
    return arrays + [array for each in tiles for array in each.arrays]


def launches_of(
    arrays: Sequence[torch.Tensor],
    counts: Sequence[TileCounts],
    tables: torch.Tensor,
    scratch: torch.Tensor,
    spec: AttentionSpec,
) -> tuple[TileLaunch, ...]:
    """Return the launches that read `planned_arrays` on the device, one for each of `counts`.

    They compute the items that the arrays have, which may be fewer than are counted. `scratch` is float32.
    """
    row_begins, num_new, lengths, *of_tiles = arrays
    rows = {"row_begins": row_begins, "num_new": num_new, "lengths": lengths}
    table = {"tables": tables, "table_stride": tables.stride(0)}
    return tuple(
        _launch(each, of_tiles[4 * place : 4 * place + 4], rows, table, scratch, spec)
        for place, each in enumerate(counts)
    )


def _launch(
    counts: TileCounts,
    arrays: Sequence[torch.Tensor],
    rows: Mapping[str, torch.Tensor],
    table: Mapping[str, Any],
    scratch: torch.Tensor,
    spec: AttentionSpec,
) -> TileLaunch:
    sequences, firsts, item_begins, item_tiles = arrays
    block_m = max(16, next_power_of_2(counts.tile_tokens * (spec.num_heads // spec.num_kv_heads)))
    num_values = scratch_size(counts, spec) // (spec.head_dim + 2) * spec.head_dim
    merge = {
        "tile_sequences": sequences,
        "tile_firsts": firsts,
        "item_begins": item_begins,
        "partial": scratch[:num_values],
        "partial_stats": scratch[num_values:],
        "TILE_TOKENS": counts.tile_tokens,
        "BLOCK_M": block_m,
        "SPLIT": counts.split,
        **rows,
    }
    most = num_programs(scratch.device) if counts.split else counts.num_items
    return TileLaunch(
        attend_grid=(min(counts.num_items, most), spec.num_kv_heads),
        attend={
            **merge,
            **table,
            "item_tiles": item_tiles,
            "num_tiles": counts.num_tiles,
            "num_warps": 8 if block_m >= 128 else 4,
        },
        merge_grid=(counts.num_tiles, spec.num_kv_heads),
        merge={**merge, "num_warps": 4} if counts.split else None,
    )


@cache
def num_programs(device: torch.device) -> int:
    """Return how many programs share the items of a step."""
    if IS_INTERPRETED:
        return 3
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
