"""From a directory or a hub id to a model's spec and weights, with every error found before allocating."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.loading.checkpoint import SafetensorsFormat as SafetensorsFormat
    from sagellm.engines.loading.families import (
        installed_families as installed_families,
        installed_formats as installed_formats,
        select_family as select_family,
    )
    from sagellm.engines.loading.generation import GenerationDefaults as GenerationDefaults
    from sagellm.engines.loading.load import (
        OpenedModel as OpenedModel,
        open_checkpoint as open_checkpoint,
        open_model as open_model,
    )
    from sagellm.engines.loading.placement import (
        resolve_device as resolve_device,
        resolve_dtype as resolve_dtype,
    )
    from sagellm.engines.loading.source import resolve_source as resolve_source
    from sagellm.engines.loading.tokenizer import load_tokenizer as load_tokenizer
    from sagellm.engines.loading.weights import WeightReader as WeightReader

__all__ = [
    "GenerationDefaults",
    "OpenedModel",
    "SafetensorsFormat",
    "WeightReader",
    "installed_families",
    "installed_formats",
    "load_tokenizer",
    "open_checkpoint",
    "open_model",
    "resolve_device",
    "resolve_dtype",
    "resolve_source",
    "select_family",
]

__getattr__ = lazy(
    __name__,
    {
        "GenerationDefaults": ".generation",
        "OpenedModel": ".load",
        "SafetensorsFormat": ".checkpoint",
        "WeightReader": ".weights",
        "installed_families": ".families",
        "installed_formats": ".families",
        "load_tokenizer": ".tokenizer",
        "open_checkpoint": ".load",
        "open_model": ".load",
        "resolve_device": ".placement",
        "resolve_dtype": ".placement",
        "resolve_source": ".source",
        "select_family": ".families",
    },
)
