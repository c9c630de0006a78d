"""Mistral: one sliding window for all layers, where the config has one."""

from __future__ import annotations

from typing import Any

from sagellm.engines.models.decoder_config import DecoderTraits
from sagellm.engines.models.decoder_family import DecoderFamily


class MistralFamily(DecoderFamily):
    """MistralForCausalLM."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"

    def traits(self, hf: Any) -> DecoderTraits:
        """The window holds for every layer."""
        return DecoderTraits(sliding_windows=(hf.sliding_window,) * hf.num_hidden_layers)
