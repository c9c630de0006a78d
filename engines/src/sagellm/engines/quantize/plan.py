"""Which tensors a quantized checkpoint has, in which files, and its config: known before any is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from sagellm.accel.lowering import lower
from sagellm.core import (
    CheckpointError,
    ConfigError,
    ExpertsSpec,
    ModelSpec,
    TensorSpec,
    UnsupportedModelError,
)
from sagellm.core.protocols.weight_form import CodeType
from sagellm.engines.loading.checkpoint import CONFIG, SINGLE
from sagellm.engines.loading.load import OpenedModel
from sagellm.engines.loading.safetensors_header import ITEM_BYTES
from sagellm.engines.quantize.formats import FORMATS, PACKED, SavedFormat

_GROUP_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
_FLOATS = ("BF16", "F16", "F32")
_HEAD = "lm_head"
_CODES = {CodeType.FP8_E4M3: "F8_E4M3"}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the new checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class PlannedWeight:
    """A tensor of the source, and what is stored of it: itself, or parts of it in a format.

    In this order: the codes, the scales and, where the format has them, the zeros and the shape.
    """

    source: TensorSpec
    saved: SavedFormat | None
    tensors: tuple[PlannedTensor, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all parts."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file."""

    name: str
    weights: tuple[PlannedWeight, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its tensors."""
        return sum(weight.num_bytes for weight in self.weights)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The files of the new checkpoint, and the content of its config.json."""

    files: tuple[PlannedFile, ...]
    config: dict[str, Any]
    bytes_before: int

    @property
    def bytes_after(self) -> int:
        """The size of all tensors of the new checkpoint."""
        return sum(file.num_bytes for file in self.files)

    @property
    def weights(self) -> Iterator[PlannedWeight]:
        """Yield the weights of all files."""
        for file in self.files:
            yield from file.weights


def make_plan(
    opened: OpenedModel, saved: SavedFormat, head: SavedFormat | None, max_shard_bytes: int
) -> Plan:
    """Plan a checkpoint whose linears are in one format and whose head is in another, or plain (None).

    Raises UnsupportedModelError for a model that only transformers describes, CheckpointError for weights
    that are quantized already, ConfigError for groups that do not divide a weight's inputs.
    """
    spec, stored = opened.spec, opened.weights.tensors
    if spec.decoder is None:
        raise UnsupportedModelError(
            f"{opened.path}: {spec.architecture} runs through transformers alone, which does not say which "
            "of its tensors are linears; only models of the families that are implemented here are quantized"
        )
    formats = {
        linear.weight.name: _fitted(saved, linear.weight, "--format")
        for layer in spec.decoder.layers
        for linear in layer.linears
        if not (isinstance(layer.feed_forward, ExpertsSpec) and linear is layer.feed_forward.router)
    }
    sources = dict(spec.tensors)
    is_tied = False
    if head is not None:
        is_tied = lower(spec, opened.weights).is_tied
        own = spec.decoder.head
        weight = spec.decoder.embedding if is_tied or own is None else own.weight
        formats[f"{_HEAD}.weight"] = _fitted(head, weight, "--head")
        sources[f"{_HEAD}.weight"] = weight
    for tensor in sources.values():
        if stored[tensor.name].form is not None:
            raise CheckpointError(
                f"{opened.path} is quantized already ({tensor.name}); give the checkpoint that it was "
                "made from"
            )
    weights = [
        _planned(name, source, formats.get(name), stored[source.name].dtype)
        for name, source in sources.items()
    ]
    config = _config(opened, formats, head)
    return Plan(
        files=_files(weights, max_shard_bytes),
        config=config,
        bytes_before=sum(stored[name].num_bytes for name in spec.tensors),
    )


def _fitted(saved: SavedFormat, weight: TensorSpec, flag: str) -> SavedFormat:
    """Return a format with groups that divide a weight's inputs."""
    num_inputs, size = weight.shape[1], saved.group_size
    if not size or num_inputs % size == 0:
        return saved
    if size == FORMATS[saved.name].group_size:
        return replace(saved, group_size=next(each for each in _GROUP_SIZES if num_inputs % each == 0))
    raise ConfigError(
        f"{flag}: {weight.name} has {num_inputs} inputs, which do not divide into groups of {size}; choose a "
        f"group_size that divides {num_inputs}"
    )


def _planned(name: str, source: TensorSpec, saved: SavedFormat | None, dtype: str) -> PlannedWeight:
    if saved is None:
        return PlannedWeight(source, None, (PlannedTensor(name, dtype, source.shape),))
    if dtype not in _FLOATS:
        raise CheckpointError(
            f"{source.name} is stored as {dtype}; weights of {', '.join(_FLOATS)} are quantized"
        )
    num_outputs, num_inputs = source.shape
    num_groups = num_inputs // saved.group_size if saved.group_size else 1
    # Scales have 8 significant bits: bfloat16 holds them, float16 not the smallest.
    scales = PlannedTensor(f"{name}_scale", "BF16" if dtype == "BF16" else "F32", (num_outputs, num_groups))
    if saved.layout != PACKED:
        codes = PlannedTensor(name, _CODES.get(saved.code, "I8"), source.shape)
        return PlannedWeight(source, saved, (codes, scales))
    words = -(-num_inputs * saved.code.bits // 32)
    tensors = [PlannedTensor(f"{name}_packed", "I32", (num_outputs, words)), scales]
    if saved.asymmetric:
        rows = -(-num_outputs * saved.code.bits // 32)
        tensors.append(PlannedTensor(f"{name}_zero_point", "I32", (rows, num_groups)))
    tensors.append(PlannedTensor(f"{name}_shape", "I64", (2,)))
    return PlannedWeight(source, saved, tuple(tensors))


def _files(weights: Sequence[PlannedWeight], max_shard_bytes: int) -> tuple[PlannedFile, ...]:
    """Fill files in the order of weights, each up to a size that only a single weight exceeds."""
    shards: list[list[PlannedWeight]] = []
    room = 0
    for weight in weights:
        if not shards or weight.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(weight)
        room -= weight.num_bytes
    if len(shards) == 1:
        return (PlannedFile(SINGLE, tuple(shards[0])),)
    return tuple(
        PlannedFile(f"model-{number:05}-of-{len(shards):05}.safetensors", tuple(shard))
        for number, shard in enumerate(shards, 1)
    )


def _config(opened: OpenedModel, formats: dict[str, SavedFormat], head: SavedFormat | None) -> dict[str, Any]:
    """Return the source's config with a `quantization_config`; a head of its own format is no longer tied."""
    config: dict[str, Any] = json.loads((opened.path / CONFIG).read_text(encoding="utf-8"))
    by_size: dict[SavedFormat, list[str]] = {}
    for name, each in formats.items():
        if name != f"{_HEAD}.weight":
            by_size.setdefault(each, []).append(name.removesuffix(".weight"))
    first, *others = sorted(by_size, key=lambda each: -len(by_size[each]))
    # Most linears are in the first: it is for all that no other target names.
    schemes = [first.scheme(["Linear"]), *(each.scheme(_patterns(by_size[each])) for each in others)]
    if head is not None:
        schemes.append(formats[f"{_HEAD}.weight"].scheme([_HEAD]))
        config["tie_word_embeddings"] = False
    layouts = sorted({scheme["format"] for scheme in schemes})
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layouts[0] if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": scheme for index, scheme in enumerate(schemes)},
        "ignore": ([] if head is not None else [_HEAD]) + _patterns(_routers(opened.spec)),
        "kv_cache_scheme": None,
    }
    return config


def _routers(spec: ModelSpec) -> list[str]:
    assert spec.decoder is not None
    return [
        layer.feed_forward.router.weight.name.removesuffix(".weight")
        for layer in spec.decoder.layers
        if isinstance(layer.feed_forward, ExpertsSpec)
    ]


def _patterns(modules: Sequence[str]) -> list[str]:
    """Return patterns of these modules, one for those that differ by their numbers alone."""
    patterns = (re.sub(r"\\\.\d+(?=\\\.)", r"\.\\d+", re.escape(module)) for module in modules)
    return [f"re:{pattern}$" for pattern in dict.fromkeys(patterns)]
