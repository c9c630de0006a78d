"""How many KV blocks fit into the memory at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagellm.core import KVLayout, ModelGeometry, OutOfMemoryError
from sagellm.core.protocols.forward import StepLimits
from sagellm.engines.forward.device_memory import available_memory_bytes
from sagellm.engines.loading.device_and_dtype import device_type
from sagellm.engines.sizes import format_bytes

if TYPE_CHECKING:
    import torch

CPU_FRACTION = 0.5
GPU_FRACTION = 0.9
_RESERVE_BYTES = 256 << 20  # the interpreter, libraries and small buffers


def find_num_blocks(
    layout: KVLayout,
    geometry: ModelGeometry,
    limits: StepLimits,
    *,
    device: str | torch.device,
    fraction: float | None,
    reserved_bytes: int = 0,
) -> int:
    """Return how many blocks to allocate: what fits, but never more than all seats could fill.

    Takes a share of the free memory (`kv.memory_fraction`; by default half on a CPU, which is shared with
    other programs, and nine tenths on a GPU) after setting aside activations and `reserved_bytes`, which the
    forward backend takes. Raises OutOfMemoryError when not even one block fits.
    """
    free_bytes = available_memory_bytes(device) or 0
    share = (
        fraction
        if fraction is not None
        else (GPU_FRACTION if device_type(device) == "cuda" else CPU_FRACTION)
    )
    set_aside = _activation_bytes(geometry, limits) + reserved_bytes + _RESERVE_BYTES
    usable = int(free_bytes * share) - set_aside
    per_sequence = -(-limits.max_model_len // layout.block_size)
    fitting = layout.num_blocks_in(max(0, usable))
    if fitting < 1:
        raise OutOfMemoryError(
            f"no KV block of {format_bytes(layout.block_bytes)} fits: {format_bytes(free_bytes)} are free on "
            f"{device}, of which {share:.0%} less activations are for KV; free memory, raise "
            f"kv.memory_fraction, or lower scheduler.max_num_batched_tokens or kv.block_size"
        )
    return min(fitting, per_sequence * limits.max_num_seqs)


def _activation_bytes(geometry: ModelGeometry, limits: StepLimits) -> int:
    # The widest moment of a layer: residual, normalised input, fused gate and up, and their product.
    tokens = limits.max_num_batched_tokens
    per_token = 4 * geometry.hidden_size + 3 * geometry.intermediate_size
    rows = min(tokens, limits.max_num_seqs)
    return 4 * tokens * per_token + 2 * 4 * rows * geometry.vocab_size
