"""Llama 2 and 3: the plain decoder."""

from __future__ import annotations

from typing import Any

from sagellm.engines.models.decoder_config import DecoderTraits
from sagellm.engines.models.decoder_family import DecoderFamily


class LlamaFamily(DecoderFamily):
    """LlamaForCausalLM."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"

    def traits(self, hf: Any) -> DecoderTraits:
        """Biases are optional."""
        return DecoderTraits(qkv_bias=hf.attention_bias, o_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)
