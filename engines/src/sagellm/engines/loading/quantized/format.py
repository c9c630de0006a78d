"""What formats of quantized checkpoints have in common: config and files in Hugging Face's layout."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from sagellm.core import (
    Checkpoint,
    CheckpointError,
    CheckpointFormatProtocol,
    StoredTensor,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.engines.loading.checkpoint import SafetensorsFormat
from sagellm.engines.loading.quantized.settings import (
    QuantizationSettings,
    read_settings,
    without_settings,
)
from sagellm.engines.loading.quantized.weights import CodedWeight, QuantizedWeights, StoredModule


class QuantizedFormat(CheckpointFormatProtocol):
    """Reads the checkpoints whose config names one method of quantization."""

    methods: ClassVar[frozenset[str]]
    parts: ClassVar[frozenset[str]]
    """How the names of tensors end that make up a quantized weight, besides `weight` itself."""

    def accepts(self, path: Path) -> bool:
        """Go by the method in `config.json`, or in the file of its own that older exporters wrote."""
        try:
            settings = read_settings(path)
        except CheckpointError:
            return False  # the fallback says what is wrong with it
        return settings is not None and self.takes(settings)

    def takes(self, settings: QuantizationSettings) -> bool:
        """Say whether these settings are of this format."""
        return settings.method.lower() in self.methods

    def open(self, path: Path) -> Checkpoint:
        """Read config and headers, and check that the parts of each weight fit each other.

        Raises CheckpointError that names what is missing, left over or damaged, UnsupportedModelError for
        what the method has and this format does not read.
        """
        checkpoint = SafetensorsFormat().open(path)
        settings = read_settings(path)
        assert settings is not None, "accepts() has found some"
        coded = self.coded_weights(settings, checkpoint.weights)
        return replace(
            checkpoint,
            config=without_settings(checkpoint.config),
            weights=QuantizedWeights(checkpoint.weights, coded),
        )

    @abstractmethod
    def coded_weights(self, settings: QuantizationSettings, files: WeightSource) -> dict[str, CodedWeight]:
        """Return the quantized weights by name."""

    def modules(self, settings: QuantizationSettings, files: WeightSource) -> list[StoredModule]:
        """Return the linears with quantized weights. Raises CheckpointError if there are none."""
        found: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for name, tensor in files.tensors.items():
            prefix, _, last = name.rpartition(".")
            if last in self.parts or (last == "weight" and tensor.dtype in _CODES):
                found[prefix][last] = tensor
        for prefix, parts in found.items():  # a plain weight beside scales is a mistake that its format names
            weight: Mapping[str, StoredTensor] = files.tensors
            if (name := f"{prefix}.weight") in weight:
                parts["weight"] = weight[name]
        if not found:
            raise CheckpointError(
                f"{settings.path} says that weights are quantized ({settings.method}), but no tensor is: "
                f"none ends in {' or '.join(sorted(self.parts))}"
            )
        return [StoredModule(name, parts, files, settings.method) for name, parts in found.items()]


_CODES = frozenset({"I8", "U8", "F8_E4M3", "F8_E5M2"})


def refuse_parts(module: StoredModule, known: Mapping[str, object] | frozenset[str]) -> None:
    """Raise UnsupportedModelError for parts that change what a weight stands for and are not known."""
    others = sorted(module.parts.keys() - set(known))
    if others:
        raise UnsupportedModelError(
            f"the weight {module.weight!r} is quantized ({module.method}) with {', '.join(others)}, which is "
            "not read"
        )
