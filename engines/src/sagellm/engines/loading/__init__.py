"""From a directory or a hub id to a model in memory, with every error found before memory is used."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.loading.checkpoint import Checkpoint as Checkpoint
    from sagellm.engines.loading.families import (
        installed_families as installed_families,
        select_family as select_family,
    )
    from sagellm.engines.loading.generation import GenerationDefaults as GenerationDefaults
    from sagellm.engines.loading.load import (
        LoadedModel as LoadedModel,
        load_checkpoint as load_checkpoint,
        load_model as load_model,
    )
    from sagellm.engines.loading.placement import (
        resolve_device as resolve_device,
        resolve_dtype as resolve_dtype,
    )
    from sagellm.engines.loading.source import resolve_source as resolve_source
    from sagellm.engines.loading.tokenizer import load_tokenizer as load_tokenizer
    from sagellm.engines.loading.weights import WeightReader as WeightReader

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "LoadedModel",
    "WeightReader",
    "installed_families",
    "load_checkpoint",
    "load_model",
    "load_tokenizer",
    "resolve_device",
    "resolve_dtype",
    "resolve_source",
    "select_family",
]

__getattr__ = lazy(
    __name__,
    {
        "Checkpoint": ".checkpoint",
        "GenerationDefaults": ".generation",
        "LoadedModel": ".load",
        "WeightReader": ".weights",
        "installed_families": ".families",
        "load_checkpoint": ".load",
        "load_model": ".load",
        "load_tokenizer": ".tokenizer",
        "resolve_device": ".placement",
        "resolve_dtype": ".placement",
        "resolve_source": ".source",
        "select_family": ".families",
    },
)
