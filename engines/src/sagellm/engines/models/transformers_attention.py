"""The attention function that transformers' models call instead of their own.

Everything it needs comes with the call: transformers passes unknown keyword arguments from the model down to
its attention layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sagellm.core import AttentionBackendProtocol, AttentionSpec

ATTENTION = "sagellm"
STEP = "sagellm_step"
"""The keyword argument that carries a PagedStep."""


@dataclass(frozen=True)
class PagedStep:
    """What one step's attention layers need."""

    kv: Sequence[torch.Tensor]  # one per layer: (blocks, 2, kv_heads, block_size, dim)
    attention: AttentionBackendProtocol
    plans: Sequence[object]  # one per layer
    specs: Sequence[AttentionSpec]  # one per layer


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend over paged KV for (1, heads, tokens, dim); returns (1, tokens, heads, dim) and no weights."""
    step: PagedStep = kwargs[STEP]
    layer: int = module.layer_idx
    out = step.attention.forward(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.kv[layer],
        step.plans[layer],
        step.specs[layer],
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Tell transformers the function's name. No mask is registered with it, so none is built."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, paged_attention)
