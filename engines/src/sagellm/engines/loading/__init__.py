"""From a model's name to its spec and weights, with every error found before allocating."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.accel.weights import WeightReader as WeightReader
    from sagellm.engines.loading.checkpoint import SafetensorsFormat as SafetensorsFormat
    from sagellm.engines.loading.device_and_dtype import (
        resolve_device as resolve_device,
        resolve_dtype as resolve_dtype,
    )
    from sagellm.engines.loading.format_and_family import (
        installed_families as installed_families,
        select_family as select_family,
    )
    from sagellm.engines.loading.generation_defaults import GenerationDefaults as GenerationDefaults
    from sagellm.engines.loading.load import (
        open_checkpoint as open_checkpoint,
        open_model as open_model,
    )
    from sagellm.engines.loading.source import resolve_source as resolve_source
    from sagellm.engines.loading.tokenizer import load_tokenizer as load_tokenizer

_MODULE_OF = {
    "GenerationDefaults": ".generation_defaults",
    "SafetensorsFormat": ".checkpoint",
    "WeightReader": "sagellm.accel.weights",
    "installed_families": ".format_and_family",
    "load_tokenizer": ".tokenizer",
    "open_checkpoint": ".load",
    "open_model": ".load",
    "resolve_device": ".device_and_dtype",
    "resolve_dtype": ".device_and_dtype",
    "resolve_source": ".source",
    "select_family": ".format_and_family",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
