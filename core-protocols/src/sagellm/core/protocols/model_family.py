"""Which checkpoints can be run, and how one becomes a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sagellm.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from sagellm.core.protocols.attention import AttentionBackendProtocol, InputBatch
    from sagellm.core.protocols.quantizer import QuantizerProtocol

HFConfig = Mapping[str, Any]
"""The content of a checkpoint's `config.json`."""


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """The sizes of a decoder that the rest of the engine needs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int  # tokens; longer requests are refused
    max_model_len_reason: str = "max_position_embeddings"
    tie_word_embeddings: bool = False


class TensorLoader(Protocol):
    """Reads tensors of a checkpoint, floating-point ones in the context's dtype."""

    def __call__(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a new tensor on the host; or fill `out`, on any device, and return that.

        Reading into the place where a tensor is to stay saves a copy, and the holes that freed
        copies leave behind.
        """


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Everything a family needs to build a model: where weights come from and in what form.

    Each tensor is asked for once. Linear weights go through `quantizer` where there is one: the
    projections of the layers and an untied head.
    """

    dtype: torch.dtype
    device: torch.device
    tensor_names: frozenset[str]
    load: TensorLoader
    quantizer: QuantizerProtocol | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFamilyMetrics:
    """What a built model weighs."""

    num_parameters: int
    weight_bytes: int


class CausalLM(ABC):
    """A decoder that runs over paged KV. `forward` is apart from `compute_logits`."""

    @abstractmethod
    def forward(
        self,
        batch: InputBatch,
        kv: torch.Tensor,
        attention: AttentionBackendProtocol,
        plan: object,
    ) -> torch.Tensor:
        """Return the last hidden states (tokens, hidden), normalised.

        `kv` is (blocks, layers, 2, kv_heads, block_size, dim).
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocab) for hidden states (rows, hidden)."""

    @abstractmethod
    def metrics(self) -> ModelFamilyMetrics:
        """Return what the model weighs."""


class ModelFamilyProtocol(ABC):
    """Turns checkpoints of some architectures into models.

    Providers are called as `factory()`. The loader asks every family in turn and takes the first
    that accepts the config and whose `geometry` does not refuse it; then it checks the
    checkpoint's shapes against `tensor_shapes`, and only after that calls `build`. A family that
    runs whatever others leave over has `is_fallback` and is asked last.
    """

    is_fallback: bool = False

    @abstractmethod
    def accepts(self, config: HFConfig) -> bool:
        """Say whether the architecture is this family's. Cheap: reads names only."""

    @abstractmethod
    def geometry(self, config: HFConfig) -> ModelGeometry:
        """Read the sizes. Raises UnsupportedModelError with the reason if a feature is missing."""

    @abstractmethod
    def tensor_shapes(
        self, config: HFConfig, tensor_names: frozenset[str] = frozenset()
    ) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor that the checkpoint must have, with its shape.

        `tensor_names` are those that it has, for architectures whose checkpoints come in several
        spellings.
        """

    def ignored_tensors(self, config: HFConfig, tensor_names: frozenset[str]) -> frozenset[str]:
        """Return those of a checkpoint's tensors that may be present and are not needed."""
        return frozenset()

    @abstractmethod
    def build(self, config: HFConfig, context: BuildContext) -> CausalLM:
        """Build the model. Called once, after all checks."""


class NullModelFamily(ModelFamilyProtocol):
    """Accepts no checkpoint."""

    def accepts(self, config: HFConfig) -> bool:
        """Never."""
        return False

    def geometry(self, config: HFConfig) -> ModelGeometry:
        """Refuse."""
        raise UnsupportedModelError("the null family runs no model")

    def tensor_shapes(
        self, config: HFConfig, tensor_names: frozenset[str] = frozenset()
    ) -> Mapping[str, tuple[int, ...]]:
        """Need nothing."""
        return {}

    def build(self, config: HFConfig, context: BuildContext) -> CausalLM:
        """Refuse."""
        raise UnsupportedModelError("the null family runs no model")
