"""Runs one step's forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagellm.core.errors import EngineError
from sagellm.core.ids import BlockId
from sagellm.core.kv_layout import KVLayout

if TYPE_CHECKING:
    import torch

    from sagellm.core.protocols.attention import AttentionBackendProtocol, InputBatch
    from sagellm.core.protocols.model_family import CausalLM


@dataclass(kw_only=True)
class ForwardMetrics:
    """What a backend has computed so far."""

    num_steps: int = 0
    num_tokens: int = 0
    total_ns: int = 0


class ForwardBackendProtocol(ABC):
    """Computes logits of a batch over paged KV.

    Providers are called as `factory(model, attention, device=..., dtype=...)`. The model runner
    calls `initialize_kv_caches` once and then, once a step and from one thread, `copy_blocks` if there is
    something to copy, and `forward`. KV writes are idempotent: the same step may be run again.
    """

    @abstractmethod
    def initialize_kv_caches(self, layout: KVLayout, num_blocks: int) -> None:
        """Allocate the KV of `num_blocks` blocks. Raises OutOfMemoryError if there is no room."""

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of the first block of each pair to the second, one pair after the other."""

    def read_blocks(self, block_ids: Sequence[BlockId], into: Sequence[memoryview]) -> None:
        """Copy the KV of blocks, `layout.block_bytes` each, to host memory. Raises EngineError by default."""
        raise EngineError(f"{type(self).__name__} cannot give KV away; take out the tiers in kv.tiers")

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Put what `read_blocks` gave into blocks. Raises EngineError by default."""
        raise EngineError(f"{type(self).__name__} cannot take KV; take out the tiers in kv.tiers")

    @abstractmethod
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return float32 logits (rows, vocab) of the tokens at `batch.logits_indices`."""

    @abstractmethod
    def metrics(self) -> ForwardMetrics:
        """Return the counts so far."""


class NullForwardBackend(ForwardBackendProtocol):
    """Computes nothing: every logit is zero. The forward pass left out, for measuring the rest."""

    def __init__(
        self,
        model: CausalLM | None = None,
        attention: AttentionBackendProtocol | None = None,
        *,
        vocab_size: int = 1,
        **_: object,
    ) -> None:
        del model, attention
        self._vocab_size = vocab_size

    def initialize_kv_caches(self, layout: KVLayout, num_blocks: int) -> None:
        """Keep no KV."""

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Have nothing to copy."""

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return zeros."""
        return batch.input_ids.new_zeros((len(batch.logits_indices), self._vocab_size)).float()

    def metrics(self) -> ForwardMetrics:
        """Return zeros."""
        return ForwardMetrics()
