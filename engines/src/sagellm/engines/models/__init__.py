"""Model families: one config-driven decoder, and transformers' own classes for the rest."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.models.decoder import Decoder as Decoder
    from sagellm.engines.models.decoder_config import DecoderConfig as DecoderConfig
    from sagellm.engines.models.llama import LlamaFamily as LlamaFamily
    from sagellm.engines.models.mistral import MistralFamily as MistralFamily
    from sagellm.engines.models.qwen2 import Qwen2Family as Qwen2Family
    from sagellm.engines.models.qwen3 import (
        Qwen3Attention as Qwen3Attention,
        Qwen3DecoderLayer as Qwen3DecoderLayer,
        Qwen3Family as Qwen3Family,
        Qwen3ForCausalLM as Qwen3ForCausalLM,
        Qwen3MLP as Qwen3MLP,
        Qwen3Model as Qwen3Model,
    )
    from sagellm.engines.models.transformers_family import TransformersFamily as TransformersFamily

__all__ = [
    "Decoder",
    "DecoderConfig",
    "LlamaFamily",
    "MistralFamily",
    "Qwen2Family",
    "Qwen3Attention",
    "Qwen3DecoderLayer",
    "Qwen3Family",
    "Qwen3ForCausalLM",
    "Qwen3MLP",
    "Qwen3Model",
    "TransformersFamily",
]

__getattr__ = lazy(
    __name__,
    {
        "Decoder": ".decoder",
        "DecoderConfig": ".decoder_config",
        "LlamaFamily": ".llama",
        "MistralFamily": ".mistral",
        "Qwen2Family": ".qwen2",
        "Qwen3Attention": ".qwen3",
        "Qwen3DecoderLayer": ".qwen3",
        "Qwen3Family": ".qwen3",
        "Qwen3ForCausalLM": ".qwen3",
        "Qwen3MLP": ".qwen3",
        "Qwen3Model": ".qwen3",
        "TransformersFamily": ".transformers_family",
    },
)
