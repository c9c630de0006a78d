"""Launches what a layer does between its products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sagellm.accel.cuda import layer_kernels as kernels
from sagellm.accel.cuda.kernel import next_power_of_2
from sagellm.accel.cuda.paged_kv import PagedKV
from sagellm.core import AttentionSpec

_GATE_PIECE = 1024


class Norm:
    """The weight of a norm by the root mean square, and what is added to the mean."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        size = len(weight)
        self.launch = {"SIZE": size, "BLOCK": next_power_of_2(size), "num_warps": _num_warps(size)}


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of all positions, (positions, D / 2) float32."""

    cosines: torch.Tensor
    sines: torch.Tensor


def add_and_normalise(x: torch.Tensor | None, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Add x (rows, hidden) to the residual in place, unless it is None, and return the sum normalised."""
    out = torch.empty_like(residual)
    if len(residual):
        kernels.add_norm[(len(residual),)](
            residual if x is None else x,
            residual,
            norm.weight,
            out,
            norm.eps,
            HAS_RESIDUAL=x is not None,
            **norm.launch,
        )
    return out


class RotateAndStore:
    """Rotates a layer's queries and keys, and stores its keys and values; made when KV is allocated."""

    def __init__(
        self,
        kv: PagedKV,
        layer: int,
        spec: AttentionSpec,
        rotation: Rotation,
        norms: tuple[Norm, Norm] | None,
    ) -> None:
        self._query_shape = spec.num_heads, spec.head_dim
        self._num_heads = spec.num_heads + 2 * spec.num_kv_heads
        half = spec.head_dim // 2
        self._launch = {
            "kv": kv.values,
            "kv_scales": kv.scales,
            "cosines": rotation.cosines,
            "sines": rotation.sines,
            "query_norm": rotation.cosines if norms is None else norms[0].weight,
            "key_norm": rotation.cosines if norms is None else norms[1].weight,
            "eps": 0.0 if norms is None else norms[0].eps,
            "NUM_HEADS": spec.num_heads,
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HALF": half,
            "BLOCK_HALF": next_power_of_2(half),
            "BLOCK_SIZE": kv.layout.block_size,
            "HAS_NORM": norms is not None,
            "SCALED_MAX": kv.scaled_max,
            "num_warps": 1,
            **kv.place(layer),
        }

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return rotated queries (rows, heads, D) of (rows, heads + 2 KV heads, D)."""
        query = qkv.new_empty(len(qkv), *self._query_shape)
        grid = (len(qkv), self._num_heads)
        kernels.rotate_and_store[grid](qkv, query, positions=positions, slots=slots, **self._launch)
        return query


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` (rows, size) of (rows, 2 * size)."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), size)
    block = min(_GATE_PIECE, next_power_of_2(size))
    grid = (len(gate_up), triton.cdiv(size, block))
    kernels.silu_and_mul[grid](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
    return out


def round_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in float8_e4m3fn, and their scales (rows, 1) float32."""
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    size = x.shape[1]
    kernels.round_to_fp8[(len(x),)](
        x, values, scales, SIZE=size, BLOCK=next_power_of_2(size), num_warps=_num_warps(size)
    )
    return values, scales


def _num_warps(size: int) -> int:
    return min(16, max(1, next_power_of_2(size) // 512))
