"""What the families of the config-driven decoder have in common."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from sagellm.core import BuildContext, CausalLM, HFConfig, ModelFamilyProtocol, ModelGeometry
from sagellm.engines.models.decoder_config import DecoderConfig, DecoderTraits
from sagellm.engines.models.decoder_loading import DecoderBuilder, decoder_shapes
from sagellm.engines.models.hf_config import architecture_of, read_hf_config

# Old checkpoints carry the frequencies that the config already determines.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class DecoderFamily(ModelFamilyProtocol):
    """Runs checkpoints of one architecture as `Decoder`; a subclass says how it differs."""

    architecture: str
    model_type: str

    @abstractmethod
    def traits(self, hf: Any) -> DecoderTraits:
        """Read from transformers' configuration object what is special about the architecture."""

    def accepts(self, config: HFConfig) -> bool:
        """Go by the architecture, or by the model type where none is named."""
        architecture = architecture_of(config)
        if architecture is None:
            return config.get("model_type") == self.model_type
        return architecture == self.architecture

    def geometry(self, config: HFConfig) -> ModelGeometry:
        """Read the sizes."""
        return self._read(config).geometry

    def tensor_shapes(
        self, config: HFConfig, tensor_names: frozenset[str] = frozenset()
    ) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor that the checkpoint must have, with its shape."""
        return decoder_shapes(self._read(config), tensor_names)

    def ignored_tensors(self, config: HFConfig, tensor_names: frozenset[str]) -> frozenset[str]:
        """Ignore stored rotary frequencies."""
        return frozenset(name for name in tensor_names if _DERIVED.fullmatch(name))

    def build(self, config: HFConfig, context: BuildContext) -> CausalLM:
        """Build the decoder."""
        return DecoderBuilder(self._read(config), context).build()

    def _read(self, config: HFConfig) -> DecoderConfig:
        # Checkpoints without a model type are read as this family's.
        hf = read_hf_config({"model_type": self.model_type, **config})
        return DecoderConfig.from_hf(hf, self.traits(hf))
