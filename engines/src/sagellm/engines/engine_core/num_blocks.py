"""How many KV blocks fit into the memory at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagellm.core import KVLayout, ModelGeometry, OutOfMemoryError
from sagellm.engines.forward.device_memory import available_memory_bytes
from sagellm.engines.loading.device_and_dtype import device_type
from sagellm.engines.sizes import format_bytes

if TYPE_CHECKING:
    import torch

CPU_FRACTION = 0.5
GPU_FRACTION = 0.9
_RESERVE_BYTES = 256 << 20  # the interpreter, libraries and small buffers


@dataclass(frozen=True, kw_only=True)
class KVDemand:
    """What, besides memory, decides the size of the KV pool."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def find_num_blocks(
    layout: KVLayout,
    geometry: ModelGeometry,
    demand: KVDemand,
    *,
    device: str | torch.device,
    fraction: float | None,
) -> int:
    """Return how many blocks to allocate: what fits, but never more than all seats could fill.

    Takes a share of the free memory (`kv.memory_fraction`; by default half on a CPU, which is shared with
    other programs, and nine tenths on a GPU) after setting activations aside. Raises OutOfMemoryError when
    not even one block fits.
    """
    free_bytes = available_memory_bytes(device) or 0
    share = (
        fraction
        if fraction is not None
        else (GPU_FRACTION if device_type(device) == "cuda" else CPU_FRACTION)
    )
    usable = int(free_bytes * share) - _activation_bytes(geometry, demand) - _RESERVE_BYTES
    per_sequence = -(-demand.max_model_len // layout.block_size)
    fitting = layout.num_blocks_in(max(0, usable))
    if fitting < 1:
        raise OutOfMemoryError(
            f"no KV block of {format_bytes(layout.block_bytes)} fits: {format_bytes(free_bytes)} are free on "
            f"{device}, of which {share:.0%} less activations are for KV; free memory, raise "
            f"kv.memory_fraction, or lower scheduler.max_num_batched_tokens or kv.block_size"
        )
    return min(fitting, per_sequence * demand.max_num_seqs)


def _activation_bytes(geometry: ModelGeometry, demand: KVDemand) -> int:
    # The widest moment of a layer: residual, normalised input, fused gate and up, and their product.
    tokens = demand.max_num_batched_tokens
    per_token = 4 * geometry.hidden_size + 3 * geometry.intermediate_size
    rows = min(tokens, demand.max_num_seqs)
    return 4 * tokens * per_token + 2 * 4 * rows * geometry.vocab_size
