"""Attention over paged KV, one layer at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    HostArray: TypeAlias = npt.NDArray[np.generic]

Array = TypeVar("Array")
"""Tensors of torch or, for a forward backend that takes them, arrays of numpy."""


class KVTables(NamedTuple, Generic[Array]):
    """Where the KV of a step is in the blocks of one KV group; as in `InputBatch`."""

    slot_mapping: Array
    block_tables: Array


@dataclass(frozen=True, kw_only=True)
class HiddenRows(Generic[Array]):
    """Hidden states of some tokens of a step: the residual stream after some layers.

    Layers are numbered as in transformers' `output_hidden_states`: 0 is the embeddings and `i` what layer `i`
    of 1 … n - 1 returns. `n`, the number of layers, is what the head is given: after the last layer and the
    final norm.
    """

    layers: tuple[int, ...]  # rising
    indices: Array  # (rows,) int64: tokens of the step
    values: Array  # (layers, rows, hidden_size) float32, contiguous; the forward backend writes it


class HiddenStates(HiddenRows["torch.Tensor"]):
    """Hidden states in tensors."""

    def take(self, layer: int, states: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Write the states (tokens, hidden_size) of a layer, plus those of `residual`, if they are wanted."""
        if layer not in self.layers:
            return
        rows = states.index_select(0, self.indices)
        if residual is not None:
            rows = rows + residual.index_select(0, self.indices)
        self.values[self.layers.index(layer)].copy_(rows)


@dataclass(kw_only=True)
class StepBatch(Generic[Array]):
    """The tokens of one step, all sequences one after another.

    Sequence `i` computes `query_lens[i]` tokens, the last of its first `seq_lens[i]`; the KV
    of the earlier ones is already in its blocks. Lists live on the host so that planning never waits
    for a device. Slots and tables are those of the first KV group.
    """

    input_ids: Array  # (tokens,) int64
    position_ids: Array  # (tokens,) int64
    slot_mapping: Array  # (tokens,) int64: block id * block_size + offset of each token's KV
    block_tables: Array  # (sequences, blocks of the longest) int64; behind a sequence's blocks any others
    query_lens: list[int]
    seq_lens: list[int]
    logits_indices: Array  # (rows,) int64: tokens whose logits are required
    more_tables: Sequence[KVTables[Array]] = ()  # of the second KV group and those after it
    hidden: HiddenRows[Array] | None = None  # what is wanted besides logits

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.query_lens)

    def of_group(self, index: int) -> Self:
        """Return the batch with the slots and tables of a KV group as its own."""
        if index == 0:
            return self
        tables = self.more_tables[index - 1]
        return replace(self, slot_mapping=tables.slot_mapping, block_tables=tables.block_tables)


@dataclass(kw_only=True)
class InputBatch(StepBatch["torch.Tensor"]):
    """A step in tensors on the backend's device."""

    hidden: HiddenStates | None = None


class HostBatch(StepBatch["HostArray"]):
    """A step in arrays of the host, for a forward backend that takes them."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention: its heads, the factor on the scores, the window in tokens, the cap on scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)


@dataclass(kw_only=True)
class AttentionMetrics:
    """What a backend has computed so far; a step counts once for each KV group."""

    num_steps: int = 0
    num_query_tokens: int = 0
    details: dict[str, float] = field(default_factory=dict)


class AttentionBackendProtocol(ABC):
    """Stores new KV in its blocks and attends over all of a sequence's KV.

    Providers are called as `factory(num_heads=..., num_kv_heads=..., head_dim=..., block_size=...)`.
    The forward backend calls `plan` once per step and KV group, and hands the result to `forward` for each
    layer of the group. A group's table may have stale ids before its window.
    Attention is causal; with a sliding window a query sees itself and the `window - 1` tokens
    before it. A backend that cannot serve a geometry raises UnsupportedModelError when it is made.
    """

    @abstractmethod
    def plan(self, batch: InputBatch) -> object:
        """Prepare what all layers of a step and group share."""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        plan: object,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Attend.

        `query` is (tokens, heads, dim), `key` and `value` (tokens, kv_heads, dim), `layer_kv`
        (blocks, 2, kv_heads, block_size, dim), written in place. Returns (tokens, heads, dim).
        """

    @abstractmethod
    def metrics(self) -> AttentionMetrics:
        """Return the counts so far."""


class NullAttentionBackend(AttentionBackendProtocol):
    """Attends to nothing: returns zeros, keeps no KV. Measures a step without its attention."""

    def __init__(self, **_: object) -> None:
        pass

    def plan(self, batch: InputBatch) -> object:
        """Prepare nothing."""
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        plan: object,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Return zeros of the query's shape."""
        return query.new_zeros(query.shape)

    def metrics(self) -> AttentionMetrics:
        """Return zeros."""
        return AttentionMetrics()
