"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from typing import Any

from sagellm.engines.models.decoder_config import DecoderTraits, window_per_layer
from sagellm.engines.models.decoder_family import DecoderFamily


class Qwen2Family(DecoderFamily):
    """Qwen2ForCausalLM."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"

    def traits(self, hf: Any) -> DecoderTraits:
        """Windows begin at a layer that the config names."""
        return DecoderTraits(qkv_bias=True, sliding_windows=window_per_layer(hf))
