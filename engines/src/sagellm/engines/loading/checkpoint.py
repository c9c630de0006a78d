"""The checkpoint format `safetensors`: its files, and the location of each tensor."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from math import prod
from pathlib import Path, PurePath
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    WHOLE,
    Checkpoint,
    CheckpointError,
    CheckpointFormatProtocol,
    ModelSpec,
    Shard,
    TensorSpec,
    UnsupportedModelError,
    WeightSource,
)
from sagellm.engines.config.shown import first_few
from sagellm.engines.loading.json_file import INDEX_BYTES, read_json, read_optional_json
from sagellm.engines.loading.safetensors_header import PlacedTensor, read_header
from sagellm.engines.models.quantized_weights import method_in_tensors, refusal_of

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
# Dtypes that numpy lacks are read as unsigned integers of the same width.
_NUMPY_DTYPES = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1"},
    **{"I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4"},
    **{"I64": "<i8", "U64": "<u8", "F64": "<f8"},
}


class SafetensorsWeights(WeightSource):
    """Maps safetensors files. A file is mapped as long as there is a view of one of its tensors."""

    def __init__(self, tensors: Mapping[str, PlacedTensor]) -> None:
        self.tensors = self._tensors = tensors
        self._maps: WeakValueDictionary[Path, mmap.mmap] = WeakValueDictionary()

    def get(self, tensor: TensorSpec, shard: Shard = WHOLE) -> npt.NDArray[np.generic]:
        """Return a view of the file's bytes."""
        stored, axis = self._tensors[tensor.name], tensor.shard_axis
        dtype = np.dtype(_NUMPY_DTYPES[stored.dtype])
        if not stored.num_bytes:
            whole = np.empty(stored.shape, dtype)
        else:
            mapped = self._map(stored)
            whole = np.frombuffer(mapped, dtype, prod(stored.shape), stored.offset).reshape(stored.shape)
        if axis is None:
            return whole
        return whole[(slice(None),) * axis + (shard.of(stored.shape[axis], tensor.shard_unit),)]

    def _map(self, stored: PlacedTensor) -> mmap.mmap:
        """Map a file, once for all views: each map keeps a file descriptor."""
        if stored.path.stat().st_size < stored.offset + stored.num_bytes:  # reading there kills the process
            raise CheckpointError(f"{stored.path} became shorter while it was read")
        mapped = self._maps.get(stored.path)
        if mapped is None:
            with open(stored.path, "rb") as file:
                self._maps[stored.path] = mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return mapped


class SafetensorsFormat(CheckpointFormatProtocol):
    """Checkpoints in the Hugging Face layout: `config.json` and safetensors, in one file or by an index."""

    is_fallback = True

    def accepts(self, path: Path) -> bool:
        """Accept every directory, to explain what is missing if no format accepts it."""
        return True

    def open(self, path: Path) -> Checkpoint:
        """Read config and headers. Raises CheckpointError that names what is missing or damaged."""
        if not (path / CONFIG).exists():
            raise CheckpointError(
                f"{path} has no {CONFIG}; it is not a checkpoint in the Hugging Face layout{_gguf_hint(path)}"
            )
        config = read_json(path / CONFIG)
        return Checkpoint(
            path=path,
            config=config,
            generation_config=read_optional_json(path / "generation_config.json"),
            weights=SafetensorsWeights(_find_tensors(path)),
        )


def _gguf_hint(path: Path) -> str:
    """Say which GGUF files of a directory could be given, if it has several and no other weights."""
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")):
        return ""
    return f"; give one of its GGUF files: {first_few([str(file) for file in files])}"


def check_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Compare the tensors with those that the config requires.

    Raises CheckpointError naming the first few that are missing, left over or of the wrong shape, and
    UnsupportedModelError for those of quantized weights that the config does not mention.
    """
    stored = checkpoint.weights.tensors
    missing = [name for name in spec.tensors if name not in stored]
    unknown = stored.keys() - spec.tensors.keys() - spec.ignored_tensors
    left_over = {name for name in unknown if not _is_empty_bias(name, checkpoint.weights)}
    mismatched = [
        f"{name} is {list(stored[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in spec.tensors.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    problems = [
        f"{len(names)} {what}: {first_few(names)}"
        for what, names in (
            ("missing", missing),
            ("not in the model", sorted(left_over)),
            ("of another shape", mismatched),
        )
        if names
    ]
    if problems and (method := method_in_tensors(left_over)) is not None:
        raise UnsupportedModelError(f"{checkpoint.path}: {refusal_of(method)}")
    if problems:
        is_headless = missing == [_HEAD] and len(problems) == 1
        config = "metadata" if checkpoint.path.is_file() else CONFIG
        reason = (
            "It is a base model's checkpoint, which cannot generate, or incomplete"
            if is_headless
            else f"The files belong to different checkpoints, or {config} was changed"
        )
        raise CheckpointError(
            f"the tensors in {checkpoint.path} contradict its {config}: {'; '.join(problems)}. {reason}"
        )


def _is_empty_bias(name: str, weights: WeightSource) -> bool:
    """Say whether a tensor is the bias of a quantized linear and zero: AutoGPTQ wrote one for each."""
    weight = weights.tensors.get(f"{name.removesuffix('.bias')}.weight") if name.endswith(".bias") else None
    if weight is None or weight.form is None:
        return False
    return not weights.get(TensorSpec(name, weights.tensors[name].shape)).any()


def files_in(path: Path) -> str:
    """List the files of a directory, for messages."""
    return first_few(sorted(file.name for file in path.iterdir())) or "no files"


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights that a directory should have. Raises CheckpointError for a bad index."""
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        return [path / SINGLE]
    return [path / PurePath(name).name for name in sorted(set(read_weight_map(path).values()))]


def missing_shards(path: Path) -> str | None:
    """Say which weight files of its index a directory lacks, or None. Raises CheckpointError."""
    files = sorted(set(read_weight_map(path).values()))
    present = {file.name for file in path.iterdir() if file.exists()}  # excludes broken links
    missing = [name for name in files if name not in present]
    return f"{len(missing)} of {len(files)} weight files: {first_few(missing)}" if missing else None


def _find_tensors(path: Path) -> dict[str, PlacedTensor]:
    """Read the headers. A file with all weights comes before an index, as in transformers."""
    if (path / SINGLE).exists():
        return read_header(path / SINGLE)
    if (path / INDEX).exists():
        return _read_shards(path)
    others = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern)
    )
    if others:
        raise CheckpointError(
            f"{path} has weights as {first_few(others)} only. Such files are pickles, which can run code, "
            f"and are never read; give a checkpoint with {SINGLE} (transformers' save_pretrained writes it)"
        )
    if hint := _gguf_hint(path):
        raise CheckpointError(f"{path} has no safetensors{hint}")
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        raise CheckpointError(f"{path} has {first_few(shards)} but no {INDEX} that says what lies where")
    raise CheckpointError(f"{path} has no weights: neither {SINGLE} nor {INDEX}; it has {files_in(path)}")


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor, according to the index. Raises CheckpointError if it is damaged."""
    weight_map = read_json(path / INDEX, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map that names a file for each tensor")
    return {name: str(file) for name, file in weight_map.items()}


def _read_shards(path: Path) -> dict[str, PlacedTensor]:
    weight_map = read_weight_map(path)
    files = sorted(set(weight_map.values()))
    outside = [name for name in files if PurePath(name).name != name]
    if outside:
        raise CheckpointError(f"{path / INDEX} names files outside of its directory: {first_few(outside)}")
    if missing := missing_shards(path):
        raise CheckpointError(f"{path} lacks {missing}; download it again")
    headers = {name: read_header(path / name) for name in files}
    absent = [name for name, file in weight_map.items() if name not in headers[file]]
    if absent:
        raise CheckpointError(
            f"{path / INDEX} names tensors that their files do not hold: {first_few(absent)}"
        )
    # Tensors in the files but not in the index are left over, too.
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    if len(tensors) < sum(map(len, headers.values())):
        twice = [name for name, count in Counter(chain.from_iterable(headers.values())).items() if count > 1]
        raise CheckpointError(f"{path} has tensors in more than one file: {first_few(twice)}")
    return tensors
