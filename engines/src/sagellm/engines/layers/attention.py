"""One layer's attention: a backend, bound to the layer's KV and its settings."""

from __future__ import annotations

from collections.abc import Sequence

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
        kv: Sequence[torch.Tensor],
        backend: AttentionBackendProtocol,
        plans: Sequence[object],
    ) -> torch.Tensor:
        """Return (tokens, heads, dim); `kv` and `plans` are those of all layers."""
        index = self.layer_index
        return backend.forward(query, key, value, kv[index], plans[index], self.spec)
