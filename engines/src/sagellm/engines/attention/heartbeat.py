"""Reports progress inside a step: once for each layer, whatever computes the attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sagellm.core import AttentionBackendProtocol, AttentionMetrics, AttentionSpec, InputBatch


def _ignore() -> None:
    pass


class Heartbeat:
    """Calls `beat` whenever a step has come further; whoever watches the engine sets it."""

    __slots__ = ("beat",)

    def __init__(self) -> None:
        self.beat: Callable[[], None] = _ignore


class BeatingAttention(AttentionBackendProtocol):
    """An attention backend that beats before and after each layer's attention."""

    def __init__(self, attention: AttentionBackendProtocol, heartbeat: Heartbeat) -> None:
        self._attention = attention
        self._heartbeat = heartbeat

    def plan(self, batch: InputBatch) -> object:
        """Prepare what all layers of a step share."""
        return self._attention.plan(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        plan: object,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Attend, and beat."""
        self._heartbeat.beat()
        out = self._attention.forward(query, key, value, layer_kv, plan, spec)
        self._heartbeat.beat()
        return out

    def metrics(self) -> AttentionMetrics:
        """Return the counts so far."""
        return self._attention.metrics()
