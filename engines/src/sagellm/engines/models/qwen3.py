"""Qwen3: queries and keys are normalised head by head."""

from __future__ import annotations

from typing import Any

from sagellm.engines.models.decoder import (
    Decoder,
    DecoderAttention,
    DecoderLayer,
    DecoderMLP,
    DecoderModel,
)
from sagellm.engines.models.decoder_config import DecoderTraits, window_per_layer
from sagellm.engines.models.decoder_family import DecoderFamily

# One decoder serves all families; these are the names under which Qwen3's parts are known.
Qwen3ForCausalLM = Decoder
Qwen3Model = DecoderModel
Qwen3DecoderLayer = DecoderLayer
Qwen3Attention = DecoderAttention
Qwen3MLP = DecoderMLP


class Qwen3Family(DecoderFamily):
    """Qwen3ForCausalLM."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"

    def traits(self, hf: Any) -> DecoderTraits:
        """Biases are optional, windows begin at a layer that the config names."""
        return DecoderTraits(
            qkv_bias=hf.attention_bias,
            o_bias=hf.attention_bias,
            qk_norm=True,
            sliding_windows=window_per_layer(hf),
        )
