"""One layer's attention: a backend, bound to the layer's KV and its settings."""

from __future__ import annotations

import torch

from sagellm.core import AttentionBackendProtocol, AttentionSpec


class Attention:
    """Attends over one layer of the paged KV through the backend given by each step."""

    def __init__(self, layer_index: int, spec: AttentionSpec) -> None:
        self.layer_index = layer_index
        self.spec = spec

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: torch.Tensor,
        backend: AttentionBackendProtocol,
        plan: object,
    ) -> torch.Tensor:
        """Return (tokens, heads, dim); `kv` is (blocks, layers, 2, kv_heads, block_size, dim)."""
        return backend.forward(query, key, value, kv[:, self.layer_index], plan, self.spec)
