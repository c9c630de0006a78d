"""What the torch backend runs: a decoder over paged KV, and the context it is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from sagellm.accel.fusion import JOINS
from sagellm.accel.operation_timer import EndOf
from sagellm.accel.weights import WeightReader
from sagellm.core import (
    AttentionBackendProtocol,
    InputBatch,
    ModelMetrics,
    QuantizerProtocol,
    SparsifierProtocol,
)


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Where weights come from and in what form they are kept; each weight is read once.

    Linear weights, the projections of the layers and an untied head, go through `quantizer` if there is one.
    Those of the layers come pruned if there is a `sparsifier`.
    """

    dtype: torch.dtype
    device: torch.device
    weights: WeightReader
    quantizer: QuantizerProtocol | None = None
    sparsifier: SparsifierProtocol | None = None
    fusions: Collection[str] = tuple(JOINS)


class CausalLM(ABC):
    """A decoder that runs over paged KV. `forward` is separate from `compute_logits`."""

    @abstractmethod
    def forward(
        self,
        batch: InputBatch,
        kv: Sequence[torch.Tensor],
        attention: AttentionBackendProtocol,
        plans: Sequence[object],
    ) -> torch.Tensor:
        """Return the last hidden states (tokens, hidden), normalised; write those of `batch.hidden`.

        `kv` and `plans` have an entry for each layer: its KV, (blocks, 2, kv_heads, block_size, dim), and
        what `attention` planned for its KV group.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocab) for hidden states (rows, hidden)."""

    def time_operations(self, end_of: EndOf) -> None:  # noqa: B027  (classes of transformers are one whole)
        """Have later passes call `end_of` after each operation. By default nothing is told apart."""

    @abstractmethod
    def metrics(self) -> ModelMetrics:
        """Return the size of the model."""
