"""Runs one step's forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from sagellm.core.errors import EngineError
from sagellm.core.ids import BlockId
from sagellm.core.kv_layout import KVLayout

if TYPE_CHECKING:
    import torch

    from sagellm.core.protocols.attention import InputBatch
    from sagellm.core.protocols.checkpoint_format import WeightSource
    from sagellm.core.protocols.model_spec import ModelSpec


Operation = Literal["embed", "norm", "qkv", "rope", "attend", "output", "gate_up", "down", "head"]
"""What a forward pass does: the products of a layer by their weights (`output`: of attention), norms but
those of heads, `rope` (with norms of heads and the KV that is stored), attention, look-ups, and the head.
An operation that is computed as a part of another counts to that one.
"""


class TimedOperation(NamedTuple):
    """When an operation of a step ran, by the clock of `time.perf_counter_ns`."""

    operation: Operation
    start_ns: int
    end_ns: int


@dataclass(kw_only=True)
class ForwardMetrics:
    """Counts of what a backend has computed so far."""

    num_steps: int = 0
    num_tokens: int = 0
    total_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class OperationWeights:
    """The weights that an operation reads in a step, and the number format that it multiplies in."""

    num_bytes: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class ModelMetrics:
    """The memory that a model takes; and the weights of each operation, if they are known.

    Of an embedding only the rows of a step's tokens are read: it has no bytes here, unless it is the head.
    """

    num_parameters: int
    weight_bytes: int
    operations: Mapping[Operation, OperationWeights] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The largest steps that an engine plans."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class ForwardBackendProtocol(ABC):
    """Computes logits of a batch over paged KV.

    Providers are called as
    `factory(spec, weights, device=..., dtype=..., attention=..., quantizer=..., sparsifier=..., shard=...,
    packed_cache=...)`: the model as a ModelSpec, a WeightSource, torch's device and dtype, an
    AttentionBackendProtocol (a backend may have its own attention instead), a QuantizerProtocol or None, a
    SparsifierProtocol (the weights come pruned by it, and its `kernel` may multiply by them) or None, the
    Shard of the weights that this rank has, and, only if users name one (`model.packed_cache`), a folder that
    keeps packed weights. If the spec needs a feature that is not in `features`, the factory is not called. If
    it cannot support anything else, it raises UnsupportedModelError before it reads a weight. It reads each
    tensor once and keeps it once.

    The engine calls `expect_steps`, the model runner `initialize_kv_caches` once and then, once per step and
    from one thread, `copy_blocks` if there is something to copy, and `forward`. KV writes are idempotent: a
    step may be run again.
    """

    features: ClassVar[Collection[str] | None] = None
    """The supported subset of `ModelSpec.features`, and of what engines may ask for besides: `hidden_states`,
    say. None: the factory itself refuses what it cannot do.
    """

    device_types: ClassVar[Collection[str] | None] = None
    """The types of torch devices for which `auto` considers it; None: all."""

    takes_arrays: ClassVar[bool] = False
    """Whether it computes on the CPU without torch, so that an engine around it need not import it.

    If so, its factory is called with the names of device and dtype (`"cpu"`, `"bfloat16"`) and None as its
    attention, and `forward` with a HostBatch; it then returns logits as an array of numpy. It takes an
    InputBatch too, where tokens are drawn from tensors.
    """

    @classmethod  # noqa: B027  (features and device types may say it all)
    def check_model(cls, spec: ModelSpec) -> None:
        """Raise UnsupportedModelError if the factory would, because of the machine or of the model's sizes.

        `doctor` asks it before a weight is read. By default it does nothing.
        """

    def expect_steps(self, layouts: Sequence[KVLayout], limits: StepLimits) -> int:
        """Prepare for steps up to these sizes, over KV of these layouts.

        Returns how many bytes `initialize_kv_caches` will allocate besides the KV, 0 by default: the engine
        sets them aside when it decides on the number of blocks.
        """
        return 0

    @abstractmethod
    def initialize_kv_caches(self, layouts: Sequence[KVLayout], num_blocks: Sequence[int]) -> None:
        """Allocate the KV of each group: `num_blocks[i]` blocks of `layouts[i]`, all of one block size.

        Group `i` takes its slots and tables from `batch.of_group(i)`. Today's models have one group; a
        backend without the feature `kv_groups` raises UnsupportedModelError for more. Raises OutOfMemoryError
        if there is no room.
        """

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of each pair's first block to its second, pair by pair in order."""

    def read_blocks(
        self, block_ids: Sequence[BlockId], into: Sequence[memoryview], *, num_in_flight: int = 0
    ) -> None:
        """Copy the KV of blocks, `layout.block_bytes` each, to host memory. Raises EngineError by default.

        The last `num_in_flight` calls of `forward` do not write these blocks, so that a device may read them
        before it has computed those steps.
        """
        raise EngineError(f"{type(self).__name__} cannot give KV away; remove the tiers from kv.tiers")

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[memoryview]) -> None:
        """Copy what `read_blocks` returned into blocks. Raises EngineError by default."""
        raise EngineError(f"{type(self).__name__} cannot take KV; remove the tiers from kv.tiers")

    @abstractmethod
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return float32 logits (rows, vocab) of the tokens at `batch.logits_indices`.

        If `batch.hidden` is not None, also write the hidden states that it names into its `values`. Only a
        backend with the feature `hidden_states` is asked for any: requests for them are refused otherwise,
        before they are queued.
        """

    def report_progress(self, beat: Callable[[], None]) -> None:  # noqa: B027  (the given attention reports)
        """Have long steps call `beat` between layers, from the calling thread; at least once per second.

        By default it does nothing: the attention backend that the factory was given calls `beat` itself, in
        each layer. Called at any time between two steps; the last call counts.
        """

    def report_operations(self, take: Callable[[Sequence[TimedOperation]], None]) -> None:  # noqa: B027
        """Have each later `forward` call `take` once, before it returns, with its operations in order.

        They do not overlap, and lie between the start of `forward` and the call. A device is waited for, and
        steps may be launched otherwise than usual. By default it does nothing: only the whole is known then.
        """

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of work that later steps would wait for, and say whether some is left.

        Called again and again while nothing waits or runs, by the thread of the steps. By default there is
        none.
        """
        return False

    @abstractmethod
    def metrics(self) -> ForwardMetrics:
        """Return the counts so far."""

    def model_metrics(self) -> ModelMetrics:
        """Return the memory of the weights as stored; by default zeros, for unknown."""
        return ModelMetrics(num_parameters=0, weight_bytes=0)


class NullForwardBackend(ForwardBackendProtocol):
    """Computes nothing: every logit is zero. The forward pass left out, for measuring the rest."""

    def __init__(
        self, spec: ModelSpec | None = None, weights: WeightSource | None = None, **_: object
    ) -> None:
        del weights
        self._vocab_size = 1 if spec is None else spec.geometry.vocab_size

    def initialize_kv_caches(self, layouts: Sequence[KVLayout], num_blocks: Sequence[int]) -> None:
        """Keep no KV."""

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Do nothing."""

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Return zeros."""
        return batch.input_ids.new_zeros((len(batch.logits_indices), self._vocab_size)).float()

    def metrics(self) -> ForwardMetrics:
        """Return zeros."""
        return ForwardMetrics()
