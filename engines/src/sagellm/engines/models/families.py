"""The families that our own decoder runs, and what each adds to the plain one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from sagellm.core import HFConfig, ModelFamilyProtocol, ModelSpec
from sagellm.engines.models.decoder import (
    Decoder,
    DecoderAttention,
    DecoderLayer,
    DecoderMLP,
    DecoderModel,
)
from sagellm.engines.models.decoder_spec import DecoderTraits, decoder_spec, window_per_layer
from sagellm.engines.models.hf_config import architecture_of, read_hf_config

# One decoder serves all families; these are the names of its parts for Qwen3.
Qwen3ForCausalLM = Decoder
Qwen3Model = DecoderModel
Qwen3DecoderLayer = DecoderLayer
Qwen3Attention = DecoderAttention
Qwen3MLP = DecoderMLP


class DecoderFamily(ModelFamilyProtocol):
    """Reads configs of one architecture as a decoder; a subclass says how it differs from the plain one."""

    architecture: str
    model_type: str

    @abstractmethod
    def traits(self, hf: Any) -> DecoderTraits:
        """Return what is special about the architecture, from transformers' configuration object."""

    def accepts(self, config: HFConfig) -> bool:
        """Go by the architecture, or by the model type where none is named."""
        architecture = architecture_of(config)
        if architecture is None:
            return config.get("model_type") == self.model_type
        return architecture == self.architecture

    def spec(self, config: HFConfig, tensor_names: frozenset[str] = frozenset()) -> ModelSpec:
        """Describe the decoder. A checkpoint without a model type is read as this family's."""
        hf = read_hf_config({"model_type": self.model_type, **config})
        return decoder_spec(self.architecture, config, hf, self.traits(hf), tensor_names)


class LlamaFamily(DecoderFamily):
    """Llama 2 and 3: the plain decoder."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"

    def traits(self, hf: Any) -> DecoderTraits:
        """Biases are optional."""
        return DecoderTraits(qkv_bias=hf.attention_bias, o_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)


class MistralFamily(DecoderFamily):
    """Mistral: one sliding window for all layers, where the config has one."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"

    def traits(self, hf: Any) -> DecoderTraits:
        """The window holds for every layer."""
        return DecoderTraits(sliding_windows=(hf.sliding_window,) * hf.num_hidden_layers)


class Qwen2Family(DecoderFamily):
    """Qwen2 and Qwen2.5: biases on query, key and value."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"

    def traits(self, hf: Any) -> DecoderTraits:
        """Windows begin at a layer that the config names."""
        return DecoderTraits(qkv_bias=True, sliding_windows=window_per_layer(hf))


class Qwen3Family(DecoderFamily):
    """Qwen3: queries and keys are normalised head by head."""

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
