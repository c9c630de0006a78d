"""The families that our own decoder runs, and what each adds to the plain one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from sagellm.core import CheckpointError, HFConfig, ModelFamilyProtocol, ModelSpec
from sagellm.engines.models.decoder_config import DECODER_ENTRIES, Entry, read_decoder_config
from sagellm.engines.models.decoder_spec import DecoderTraits, decoder_spec, window_per_layer
from sagellm.engines.models.hf_config import architecture_of, read_hf_config


class DecoderFamily(ModelFamilyProtocol):
    """Reads configs of one architecture as a decoder; a subclass says how it differs from the plain one."""

    architecture: str
    model_type: str
    entries: ClassVar[dict[str, Entry]]
    """The entries of config.json that are read, with the defaults of transformers' class."""

    @abstractmethod
    def traits(self, hf: Any) -> DecoderTraits:
        """Return what is special about the architecture, from what `read` returned."""

    def accepts(self, config: HFConfig) -> bool:
        """Go by the architecture or its base model, or by the model type where none is named."""
        architecture = architecture_of(config)
        if architecture is None:
            return config.get("model_type") == self.model_type
        return architecture in (self.architecture, self.architecture.removesuffix("ForCausalLM") + "Model")

    def read(self, config: HFConfig) -> Any:
        """Return an object with transformers' attributes. Raises CheckpointError, UnsupportedModelError."""
        return read_decoder_config(config, self.entries)

    def spec(self, config: HFConfig, tensor_names: frozenset[str] = frozenset()) -> ModelSpec:
        """Describe the decoder. A checkpoint without a model type is read as this family's.

        One of another model type has the defaults of that type, which transformers knows.
        """
        is_own = config.get("model_type", self.model_type) == self.model_type
        hf = self.read(config) if is_own else read_hf_config(config)
        return decoder_spec(self.architecture, config, hf, self.traits(hf), tensor_names)


class LlamaFamily(DecoderFamily):
    """Llama 2 and 3: the plain decoder."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    entries: ClassVar[dict[str, Entry]] = DECODER_ENTRIES | {
        "intermediate_size": Entry(int, 11_008),
        "num_key_value_heads": Entry(int, None, is_optional=True),
        "max_position_embeddings": Entry(int, 2048),
        "attention_bias": Entry(bool, default=False),
        "mlp_bias": Entry(bool, default=False),
    }

    def accepts(self, config: HFConfig) -> bool:
        """Leave EXAONE to transformers: it is this architecture, but its tensors have names of its own."""
        return config.get("model_type") != "exaone" and super().accepts(config)

    def read(self, config: HFConfig) -> Any:
        """Demand heads that divide the hidden size, even where the config has a head_dim."""
        read = super().read(config)
        if read.hidden_size % read.num_attention_heads:
            raise CheckpointError(
                f"config.json: hidden_size is {read.hidden_size}, not a multiple of num_attention_heads, "
                f"{read.num_attention_heads}"
            )
        return read

    def traits(self, hf: Any) -> DecoderTraits:
        """Biases are optional."""
        return DecoderTraits(qkv_bias=hf.attention_bias, o_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)


class MistralFamily(DecoderFamily):
    """Mistral: one sliding window for all layers, where the config has one."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    entries: ClassVar[dict[str, Entry]] = DECODER_ENTRIES | {
        "intermediate_size": Entry(int, 14_336),
        "num_key_value_heads": Entry(int, 8),
        "max_position_embeddings": Entry(int, 131_072),
        "sliding_window": Entry(int, 4096, is_optional=True),
    }

    def traits(self, hf: Any) -> DecoderTraits:
        """The window holds for every layer."""
        return DecoderTraits(sliding_windows=(hf.sliding_window,) * hf.num_hidden_layers)


class Qwen2Family(DecoderFamily):
    """Qwen2 and Qwen2.5: biases on query, key and value."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    entries: ClassVar[dict[str, Entry]] = DECODER_ENTRIES | {
        "vocab_size": Entry(int, 151_936),
        "intermediate_size": Entry(int, 22_016),
        "num_key_value_heads": Entry(int, 32, is_optional=True),
        "max_position_embeddings": Entry(int, 32_768),
        "use_sliding_window": Entry(bool, default=False),
        "sliding_window": Entry(int, 4096, is_optional=True),
        "max_window_layers": Entry(int, 28),
    }

    def read(self, config: HFConfig) -> Any:
        """Windows are off unless they are switched on; then they begin at a layer, unless all are named."""
        read = super().read(config)
        read.sliding_window = read.sliding_window if read.use_sliding_window else None
        num_layers = read.num_hidden_layers
        first = num_layers if read.sliding_window is None else read.max_window_layers
        read.layer_types = read.layer_types or tuple(
            "sliding_attention" if index >= first else "full_attention" for index in range(num_layers)
        )
        return read

    def traits(self, hf: Any) -> DecoderTraits:
        """Windows begin at a layer that the config names."""
        return DecoderTraits(qkv_bias=True, sliding_windows=window_per_layer(hf))


class Qwen3Family(Qwen2Family):
    """Qwen3: queries and keys are normalised head by head."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    entries: ClassVar[dict[str, Entry]] = Qwen2Family.entries | {
        "head_dim": Entry(int, 128),
        "attention_bias": Entry(bool, default=False),
    }

    def traits(self, hf: Any) -> DecoderTraits:
        """Biases are optional, windows begin at a layer that the config names."""
        return DecoderTraits(
            qkv_bias=hf.attention_bias,
            o_bias=hf.attention_bias,
            qk_norm=True,
            sliding_windows=window_per_layer(hf),
        )
