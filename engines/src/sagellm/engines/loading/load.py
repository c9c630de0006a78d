"""Opening a model: find it, check it, and only then allocate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    WHOLE,
    CheckpointFormatProtocol,
    ModelFamilyProtocol,
    ModelSpec,
    PluginRegistry,
    Shard,
    TensorSpec,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.engines.loading.checkpoint import CONFIG, SafetensorsFormat, check_tensors
from sagellm.engines.loading.device_and_dtype import resolve_dtype_name, torch_dtype
from sagellm.engines.loading.format_and_family import (
    installed_families,
    installed_formats,
    select_family,
    select_format,
)
from sagellm.engines.loading.generation_defaults import GenerationDefaults
from sagellm.engines.loading.quantized.settings import SETTINGS_FILES
from sagellm.engines.loading.source import resolve_source, resolve_tokenizer
from sagellm.engines.loading.stored_forms import stored_forms, with_int8_activations
from sagellm.engines.loading.tokenizer import check_tokenizer, open_tokenizer
from sagellm.engines.progress import Advance, progress_bar

if TYPE_CHECKING:
    import torch

    from sagellm.core.protocols.weight_form import CodedRows
    from sagellm.engines.config.sections import ModelConfig
    from sagellm.engines.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A checkpoint that has passed all checks, before any weight is read."""

    path: Path
    spec: ModelSpec
    weights: WeightSource
    dtype_name: str  # as configurations write it
    tokenizer: Tokenizer | None
    generation: GenerationDefaults
    activations: str | None = None  # as `model.activations`

    @property
    def dtype(self) -> torch.dtype:
        """The number format as torch has it."""
        return torch_dtype(self.dtype_name)

    @property
    def files(self) -> set[Path]:
        """The files with config and weights."""
        settings = [self.path / name for name in (CONFIG, *SETTINGS_FILES)]
        tensors = self.weights.tensors.values()
        weights = {each.path for tensor in tensors for each in (tensor, *tensor.parts.values())}
        return weights | {path for path in settings if path.exists()}

    @contextmanager
    def reading(self) -> Iterator[WeightSource]:
        """Yield the weights in the forms that are computed with, with a progress bar on a terminal."""
        total = sum(tensor.num_bytes for tensor in self.weights.tensors.values())
        with progress_bar("loading weights", total=total, unit="bytes") as advance:
            weights = _CountedWeights(self.weights, advance)
            if self.activations is not None:
                weights.tensors = with_int8_activations(weights.tensors)
            yield weights


class _CountedWeights(WeightSource):
    """Reports the bytes of each tensor once."""

    def __init__(self, weights: WeightSource, advance: Advance) -> None:
        self.tensors = weights.tensors
        self._weights, self._advance = weights, advance
        self._left = {name: tensor.num_bytes for name, tensor in weights.tensors.items()}

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> npt.NDArray[np.generic]:
        """Return a view of the file's bytes."""
        array = self._weights.get(tensor, shard)
        self._count(tensor, array)
        return array

    def pieces(self, tensor: TensorSpec, multiple: int = 1) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
        """Yield a tensor's pieces, and count each."""
        for begin, rows in self._weights.pieces(tensor, multiple):
            self._count(tensor, rows)
            yield begin, rows
            del rows  # before the next piece is made

    def coded_rows(self, tensor: TensorSpec, rows: slice, shard: Shard = WHOLE) -> CodedRows:
        """Return rows of a quantized weight, and count what they take in its file, by their share of all."""
        coded = self._weights.coded_rows(tensor, rows, shard)
        stored = self.tensors[tensor.name]
        self._add(tensor, -(-stored.num_bytes * len(coded.codes) // stored.shape[0]))
        return coded

    def input_order(self, tensor: TensorSpec) -> npt.NDArray[np.int64] | None:
        """Return the order of a weight's inputs."""
        return self._weights.input_order(tensor)

    def _count(self, tensor: TensorSpec, array: npt.NDArray[np.generic]) -> None:
        self._add(tensor, array.nbytes)

    def _add(self, tensor: TensorSpec, num_bytes: int) -> None:
        num_bytes = min(num_bytes, self._left[tensor.name])
        self._left[tensor.name] -= num_bytes
        self._advance(num_bytes)


def open_model(settings: ModelConfig, registry: PluginRegistry) -> OpenedModel:
    """Open the model that a configuration names, with the installed families and formats.

    Raises CheckpointError or UnsupportedModelError with the reason.
    """
    opened = open_checkpoint(
        resolve_source(settings.name, revision=settings.revision),
        installed_families(registry),
        installed_formats(registry),
        dtype=settings.dtype,
        tokenizer_path=resolve_tokenizer(settings),
    )
    if settings.activations is None:
        return opened
    tensors = opened.weights.tensors
    if with_int8_activations(tensors) == tensors:
        raise UnsupportedModelError(
            f"{opened.path}: model.activations rounds what is multiplied by weights stored as integers with "
            f"plain activations, and there are none here (it has {', '.join(stored_forms(opened.weights))}); "
            "leave it out"
        )
    return replace(opened, activations=settings.activations)


def open_checkpoint(
    path: Path,
    families: Iterable[ModelFamilyProtocol],
    formats: Iterable[CheckpointFormatProtocol] = (SafetensorsFormat(),),
    *,
    dtype: str | torch.dtype = "auto",
    tokenizer_path: Path | None = None,
) -> OpenedModel:
    """Open a directory or file and check config, headers, shapes and tokenizer."""
    checkpoint = select_format(path, formats).open(path)
    config = checkpoint.config
    spec = select_family(config, families, frozenset(checkpoint.weights.tensors)).spec
    check_tensors(checkpoint, spec)
    generation = GenerationDefaults.read(checkpoint.generation_config, config, spec.geometry)
    tokenizer = open_tokenizer(tokenizer_path or path)
    if tokenizer is not None:
        check_tokenizer(tokenizer, spec.geometry.vocab_size, tokenizer_path or path)
    return OpenedModel(
        path=path,
        spec=spec,
        weights=checkpoint.weights,
        dtype_name=resolve_dtype_name(dtype, config),
        tokenizer=tokenizer,
        generation=generation,
    )
