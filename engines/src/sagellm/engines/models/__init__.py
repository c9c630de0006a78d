"""Model families: one config-driven decoder, and transformers' own classes for the rest."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.models.decoder import (
        Qwen3Attention as Qwen3Attention,
        Qwen3DecoderLayer as Qwen3DecoderLayer,
        Qwen3ForCausalLM as Qwen3ForCausalLM,
        Qwen3MLP as Qwen3MLP,
        Qwen3Model as Qwen3Model,
    )
    from sagellm.engines.models.families import Qwen3Family as Qwen3Family
    from sagellm.engines.models.transformers_family import TransformersFamily as TransformersFamily

_MODULE_OF = {
    "Qwen3Attention": ".decoder",
    "Qwen3DecoderLayer": ".decoder",
    "Qwen3Family": ".families",
    "Qwen3ForCausalLM": ".decoder",
    "Qwen3MLP": ".decoder",
    "Qwen3Model": ".decoder",
    "TransformersFamily": ".transformers_family",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
