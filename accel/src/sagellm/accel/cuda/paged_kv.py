"""The KV of all blocks on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sagellm.core import AttentionSpec, KVLayout, OutOfMemoryError, UnsupportedModelError

_SCALED_MAX = {"float8_e4m3fn": 448, "int8": 127}
_SCALE_BYTES = 4


class PagedKV:
    """One zeroed buffer, laid out by a KVLayout.

    Number formats of 8 bits have one float32 scale per token, head, and key or value, behind the values of
    the block. Raises UnsupportedModelError for another layout, OutOfMemoryError if there is no room.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.scaled_max = _SCALED_MAX.get(layout.group.dtype, 0)
        wanted = _SCALE_BYTES * layout.block_size if self.scaled_max else 0
        if layout.group.scale_bytes_per_head != wanted or layout.scales_offset_bytes % _SCALE_BYTES:
            raise UnsupportedModelError(
                f"KV in {layout.group.dtype} needs {wanted} bytes of scales per head at a multiple of "
                f"{_SCALE_BYTES} bytes; the layout is {layout.signature}"
            )
        size = num_blocks * layout.block_bytes
        if device.type == "cuda" and size > (free := torch.cuda.mem_get_info(device)[0]):
            raise OutOfMemoryError(
                f"KV of {num_blocks} blocks needs {size:,} bytes; {free:,} are free on {device}; lower "
                f"kv.num_blocks (at most {layout.num_blocks_in(free)} fit)"
            )
        try:
            flat = torch.zeros(size, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(f"KV of {num_blocks} blocks needs {size:,} bytes: {error}") from error
        self.bytes = flat.view(num_blocks, layout.block_bytes)
        self.values = flat.view(getattr(torch, layout.group.dtype))
        self.scales = flat.view(torch.float32)

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, (blocks, KV heads, block_size, D) each."""
        layout = self.layout
        shape = (len(self.bytes), layout.group.num_kv_heads, layout.block_size, layout.group.head_dim)
        strides = (layout.block_stride, layout.head_stride, layout.token_stride, 1)
        begin = layer * layout.layer_stride
        return (
            self.values.as_strided(shape, strides, begin),
            self.values.as_strided(shape, strides, begin + layout.kv_stride),
        )

    def place(self, layer: int) -> dict[str, int]:
        """Return where a layer's KV lies, in elements of the KV and, for scales, in float32s."""
        layout = self.layout
        heads = layout.group.num_kv_heads * layout.block_size  # scales of a layer's keys
        return {
            "layer_offset": layer * layout.layer_stride,
            "block_stride": layout.block_stride,
            "head_stride": layout.head_stride,
            "value_offset": layout.kv_stride,
            "scales_offset": layout.scales_offset_bytes // _SCALE_BYTES + layer * 2 * heads,
            "scale_stride": layout.block_bytes // _SCALE_BYTES,
            "value_scale_offset": heads,
        }


@dataclass(frozen=True)
class LayerKV:
    """A layer's attention and its KV, made when KV is allocated."""

    spec: AttentionSpec
    views: tuple[torch.Tensor, torch.Tensor]  # keys and values, (blocks, KV heads, block_size, D) each
    attend: Mapping[str, Any]  # what each launch of a kernel has in common
    merge: Mapping[str, Any]
