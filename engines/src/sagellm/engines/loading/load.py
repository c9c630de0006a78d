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
    ModelFamilyProtocol,
    ModelGeometry,
    PluginRegistry,
    QuantizerProtocol,
)
from sagellm.engines.loading.checkpoint import Checkpoint
from sagellm.engines.loading.families import installed_families, select_family
from sagellm.engines.loading.generation import GenerationDefaults
from sagellm.engines.loading.placement import dtype_name, resolve_dtype
from sagellm.engines.loading.source import resolve_source, resolve_tokenizer
from sagellm.engines.loading.tokenizer import check_tokenizer, load_tokenizer
from sagellm.engines.loading.weights import WeightReader
from sagellm.engines.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sagellm.engines.config.sections import ModelConfig


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

    Raises CheckpointError or UnsupportedModelError with the reason.
    """
    path = resolve_source(settings.name, revision=settings.revision)
    return load_checkpoint(
        path,
        installed_families(registry),
        dtype=settings.dtype,
        device=device,
        quantizer=quantizer,
        tokenizer_path=resolve_tokenizer(settings),
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
    """Load a directory, with a progress bar on a terminal.

    Nothing is allocated before config, headers and shapes have been checked.
    """
    checkpoint = Checkpoint.open(path)
    config, names = checkpoint.config, frozenset(checkpoint.tensors)
    selected = select_family(config, families)
    family = selected.family
    checkpoint.check(family.tensor_shapes(config, names), family.ignored_tensors(config, names))
    generation = GenerationDefaults.read(checkpoint.generation_config, config)
    tokenizer = load_tokenizer(tokenizer_path or path)
    if tokenizer is not None:
        check_tokenizer(tokenizer, selected.geometry.vocab_size, tokenizer_path or path)
    resolved = resolve_dtype(dtype, config)
    num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    with progress_bar("loading weights", total=num_bytes, unit="bytes") as advance, torch.inference_mode():
        context = BuildContext(
            dtype=resolved,
            device=device or torch.device("cpu"),
            tensor_names=names,
            load=WeightReader(checkpoint.tensors, resolved, advance).load,
            quantizer=quantizer,
        )
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
