"""Reports progress within a step, at each layer, whichever backend computes the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sagellm.core import AttentionBackendProtocol, AttentionMetrics, AttentionSpec, InputBatch

if TYPE_CHECKING:
    import torch


class ProgressHook:
    """Holds the callback `beat`, which a server sets after the engine is built."""

    __slots__ = ("beat",)

    def __init__(self) -> None:
        self.beat: Callable[[], None] = lambda: None


class ProgressReportingAttention(AttentionBackendProtocol):
    """Delegates to another backend, and calls `beat` before and after each layer's attention."""

    def __init__(self, attention: AttentionBackendProtocol, progress: ProgressHook) -> None:
        self._attention = attention
        self._progress = progress

    def plan(self, batch: InputBatch) -> object:
        """Delegate."""
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
        """Delegate, with a beat before and after."""
        self._progress.beat()
        out = self._attention.forward(query, key, value, layer_kv, plan, spec)
        self._progress.beat()
        return out

    def metrics(self) -> AttentionMetrics:
        """Delegate."""
        return self._attention.metrics()
