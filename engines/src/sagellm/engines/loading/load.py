"""Loading a model: find it, check it, and only then allocate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sagellm.core import (
    BuildContext,
    CausalLM,
    ConfigError,
    ModelFamilyProtocol,
    ModelGeometry,
    PluginRegistry,
    QuantizerProtocol,
)
from sagellm.engines.loading.checkpoint import Checkpoint
from sagellm.engines.loading.families import installed_families, select_family
from sagellm.engines.loading.generation import GenerationDefaults
from sagellm.engines.loading.placement import dtype_name, resolve_dtype
from sagellm.engines.loading.source import resolve_source
from sagellm.engines.loading.tokenizer import load_tokenizer
from sagellm.engines.loading.weights import WeightReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sagellm.engines.config.schema import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what its checkpoint says about using it."""

    path: Path
    model: CausalLM
    geometry: ModelGeometry
    dtype: torch.dtype
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None
    generation: GenerationDefaults

    @property
    def dtype_name(self) -> str:
        """The number format as configurations write it."""
        return dtype_name(self.dtype)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.generation.eos_token_ids


def load_model(
    settings: ModelConfig,
    registry: PluginRegistry,
    *,
    device: torch.device,
    quantizer: QuantizerProtocol | None = None,
) -> LoadedModel:
    """Load the model that a configuration names, with the model families that are installed.

    Raises ConfigError if it names none, CheckpointError or UnsupportedModelError with the reason.
    """
    if settings.name is None:
        raise ConfigError("model.name is not set; give a directory or a hub id")
    path = resolve_source(settings.name, revision=settings.revision)
    tokenizer_path = resolve_source(settings.tokenizer) if settings.tokenizer else path
    return load_checkpoint(
        path,
        installed_families(registry),
        dtype=settings.dtype,
        device=device,
        quantizer=quantizer,
        tokenizer_path=tokenizer_path,
    )


def load_checkpoint(
    path: Path,
    families: Iterable[ModelFamilyProtocol],
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | None = None,
    quantizer: QuantizerProtocol | None = None,
    tokenizer_path: Path | None = None,
) -> LoadedModel:
    """Load a directory. Nothing is allocated before config, headers and shapes have been checked."""
    checkpoint = Checkpoint.open(path)
    config, names = checkpoint.config, frozenset(checkpoint.tensors)
    selected = select_family(config, families)
    family = selected.family
    checkpoint.check(family.tensor_shapes(config, names), family.ignored_tensors(config, names))
    generation = GenerationDefaults.read(checkpoint.generation_config, config)
    tokenizer = load_tokenizer(tokenizer_path or path)
    resolved = resolve_dtype(dtype, config)
    context = BuildContext(
        dtype=resolved,
        device=device or torch.device("cpu"),
        tensor_names=names,
        load=WeightReader(checkpoint.tensors, resolved).load,
        quantizer=quantizer,
    )
    with torch.inference_mode():
        model = family.build(config, context)
    return LoadedModel(
        path=path,
        model=model,
        geometry=selected.geometry,
        dtype=resolved,
        device=context.device,
        tokenizer=tokenizer,
        generation=generation,
    )
