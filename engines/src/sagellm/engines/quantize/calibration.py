"""From a text to the factors of a model's tensors, kept beside the checkpoint until it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from sagellm.accel.weights import WeightReader
from sagellm.core import CheckpointError, ConfigError, TensorSpec
from sagellm.engines.loading.checkpoint import SafetensorsWeights
from sagellm.engines.loading.load import OpenedModel
from sagellm.engines.loading.safetensors_header import PlacedTensor, read_header
from sagellm.engines.progress import progress_bar
from sagellm.engines.quantize.equalization import Factors, equalize_layer
from sagellm.engines.quantize.plan import Plan
from sagellm.engines.quantize.recording import record_inputs
from sagellm.engines.quantize.tensor_file import write_floats
from sagellm.engines.text.guarded_tokenizer import encode

_MIN_TOKENS = 128
_MAX_BYTES = 1 << 20  # of text: enough for 16,384 tokens
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_text(path: Path) -> str:
    """Return the text that a model is calibrated by, at most its first MiB. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES)
        return text.decode(errors="strict" if len(text) < _MAX_BYTES else "ignore")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--calibrate: {path} cannot be read: {reason}") from None


def digest_of(text: str) -> str:
    """Return what tells texts apart."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


class Calibration:
    """The factors of tensors, in a file for each layer, of which what is used is mapped."""

    def __init__(self, folder: Path | None = None) -> None:
        tensors: dict[str, PlacedTensor] = {}
        for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
            try:
                tensors |= read_header(path)
            except CheckpointError as error:
                raise CheckpointError(f"{error}: remove {folder}, and it is made again") from error
        self._weights = SafetensorsWeights(tensors)

    def get(self, name: str) -> Factors | None:
        """Return the factors of a tensor, None for one that has none."""
        found = {
            what: torch.from_numpy(np.array(self._weights.get(TensorSpec(key, stored.shape))))
            for what in ("outputs", "inputs", "products")
            if (stored := self._weights.tensors.get(key := f"{what}:{name}")) is not None
        }
        return Factors(**found) if found else None


def calibrate(opened: OpenedModel, plan: Plan, text: str, folder: Path) -> Calibration:
    """Find the factors by a text, and keep them in a folder; return those that are there already.

    Raises ConfigError for a text that is too short, UnsupportedModelError for a model that is not recorded.
    """
    if folder.exists():
        return Calibration(folder)
    decoder = opened.spec.decoder
    assert decoder is not None, "the plan has one"
    recorded = record_inputs(opened, _tokens(opened, text))
    formats = {each.source.name: each.saved for each in plan.weights if each.saved is not None}
    partial_folder = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial_folder, ignore_errors=True)  # of a run that was stopped
    partial_folder.mkdir()
    label = "searching scales"
    with progress_bar(label, total=len(recorded), unit="layers") as advance, torch.inference_mode():
        for index, (layer, inputs) in enumerate(zip(decoder.layers, recorded, strict=True)):
            found = equalize_layer(layer, inputs, formats, partial(_stored, opened))
            write_floats(partial_folder / f"{index:05}.safetensors", _named(found))
            advance(1)
    partial_folder.rename(folder)
    return Calibration(folder)


def _tokens(opened: OpenedModel, text: str) -> list[int]:
    if opened.tokenizer is None:
        raise ConfigError(f"{opened.path} has no tokenizer, which --calibrate needs")
    token_ids = encode(opened.tokenizer, text)
    if len(token_ids) < _MIN_TOKENS:
        raise ConfigError(
            f"the text of --calibrate has {len(token_ids)} tokens; give at least {_MIN_TOKENS}, better 16,000"
        )
    return token_ids


def _stored(opened: OpenedModel, tensor: TensorSpec) -> torch.Tensor:
    return WeightReader(opened.weights, _TORCH[opened.weights.tensors[tensor.name].dtype]).load(tensor)


def _named(found: Mapping[str, Factors]) -> dict[str, torch.Tensor]:
    return {
        f"{what}:{name}": values
        for name, factors in found.items()
        for what, values in vars(factors).items()
        if values is not None
    }
