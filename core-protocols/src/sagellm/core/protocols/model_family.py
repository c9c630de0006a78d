"""Which checkpoints can be run, and which model each of them is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.model_spec import HFConfig, ModelSpec


class ModelFamilyProtocol(ABC):
    """Reads the configs of some architectures.

    Providers are called as `factory()`. The loader asks every family in turn and takes the first that accepts
    the config and whose `spec` does not refuse it; then it checks the checkpoint's tensors against the spec,
    and only after that is memory allocated. A family for everything that others decline has `is_fallback`
    and is asked last.
    """

    is_fallback: bool = False

    @abstractmethod
    def accepts(self, config: HFConfig) -> bool:
        """Say whether the architecture is this family's. Cheap: reads names only."""

    @abstractmethod
    def spec(self, config: HFConfig, tensor_names: frozenset[str] = frozenset()) -> ModelSpec:
        """Return the model that a config describes.

        `tensor_names` are those in the checkpoint, for architectures whose checkpoints use several
        spellings. Raises UnsupportedModelError with the reason if a feature is missing, CheckpointError for
        sizes that contradict each other.
        """


class NullModelFamily(ModelFamilyProtocol):
    """Accepts no checkpoint."""

    def accepts(self, config: HFConfig) -> bool:
        """Never."""
        return False

    def spec(self, config: HFConfig, tensor_names: frozenset[str] = frozenset()) -> ModelSpec:
        """Refuse."""
        raise UnsupportedModelError("the null family runs no model")
