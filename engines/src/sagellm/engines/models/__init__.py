"""Model families: one config-driven decoder, and transformers' own classes for the rest."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.models.families import (
        Qwen3Attention as Qwen3Attention,
        Qwen3DecoderLayer as Qwen3DecoderLayer,
        Qwen3Family as Qwen3Family,
        Qwen3ForCausalLM as Qwen3ForCausalLM,
        Qwen3MLP as Qwen3MLP,
        Qwen3Model as Qwen3Model,
    )
    from sagellm.engines.models.transformers_family import TransformersFamily as TransformersFamily

_MODULE_OF = {
    "Qwen3Attention": ".families",
    "Qwen3DecoderLayer": ".families",
    "Qwen3Family": ".families",
    "Qwen3ForCausalLM": ".families",
    "Qwen3MLP": ".families",
    "Qwen3Model": ".families",
    "TransformersFamily": ".transformers_family",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
