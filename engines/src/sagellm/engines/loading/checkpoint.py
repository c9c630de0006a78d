"""A checkpoint's directory: its config, and where each of its tensors lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from sagellm.core import CheckpointError, HFConfig
from sagellm.engines.loading.json_file import INDEX_BYTES, read_json, read_optional_json
from sagellm.engines.loading.safetensors_header import StoredTensor, read_header

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NUM_NAMED = 5


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose files all exist and agree with each other. No weight has been read yet."""

    path: Path
    config: HFConfig
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read config and headers. Raises CheckpointError that names what is missing or damaged."""
        if not (path / CONFIG).exists():
            raise CheckpointError(
                f"{path} has no {CONFIG}; it is not a checkpoint in the Hugging Face layout"
            )
        config = read_json(path / CONFIG)
        return cls(
            path=path,
            config=config,
            generation_config=read_optional_json(path / "generation_config.json"),
            tensors=_find_tensors(path),
        )

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Compare the tensors with those that the config calls for.

        Raises CheckpointError naming the first few that are missing, left over or of another shape.
        """
        missing = [name for name in shapes if name not in self.tensors]
        left_over = self.tensors.keys() - shapes.keys() - set(ignored)
        mismatched = [
            f"{name} is {list(self.tensors[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in self.tensors and self.tensors[name].shape != tuple(shape)
        ]
        problems = [
            f"{len(names)} {what}: {_first(names)}"
            for what, names in (
                ("missing", missing),
                ("not in the model", sorted(left_over)),
                ("of another shape", mismatched),
            )
            if names
        ]
        if problems:
            raise CheckpointError(
                f"the tensors in {self.path} contradict its {CONFIG}: {'; '.join(problems)}. The files "
                f"belong to different checkpoints, or {CONFIG} was changed"
            )


def files_in(path: Path) -> str:
    """List the files of a directory, for messages."""
    return _first(sorted(file.name for file in path.iterdir())) or "no files"


def missing_shards(path: Path) -> str | None:
    """Say which weight files of its index a directory lacks, or None. Raises CheckpointError."""
    files = sorted(set(read_weight_map(path).values()))
    present = {file.name for file in path.iterdir() if file.exists()}  # no link to what is gone
    missing = [name for name in files if name not in present]
    return f"{len(missing)} of {len(files)} weight files: {_first(missing)}" if missing else None


def _first(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
    if (path / INDEX).exists():
        return _read_shards(path)
    if (path / SINGLE).exists():
        return read_header(path / SINGLE)
    others = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern)
    )
    if others:
        raise CheckpointError(
            f"{path} has weights as {_first(others)} only. Such files are pickles, which can run code, and "
            f"are never read; give a checkpoint with {SINGLE} (transformers' save_pretrained writes it)"
        )
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        raise CheckpointError(f"{path} has {_first(shards)} but no {INDEX} that says what lies where")
    raise CheckpointError(f"{path} has no weights: neither {SINGLE} nor {INDEX}; it has {files_in(path)}")


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file that holds each tensor by the index. Raises CheckpointError if that is damaged."""
    weight_map = read_json(path / INDEX, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map that names a file for each tensor")
    return {name: str(file) for name, file in weight_map.items()}


def _read_shards(path: Path) -> dict[str, StoredTensor]:
    weight_map = read_weight_map(path)
    files = sorted(set(weight_map.values()))
    outside = [name for name in files if PurePath(name).name != name]
    if outside:
        raise CheckpointError(f"{path / INDEX} names files outside of its directory: {_first(outside)}")
    if missing := missing_shards(path):
        raise CheckpointError(f"{path} lacks {missing}; download it again")
    headers = {name: read_header(path / name) for name in files}
    absent = [name for name, file in weight_map.items() if name not in headers[file]]
    if absent:
        raise CheckpointError(f"{path / INDEX} names tensors that their files do not hold: {_first(absent)}")
    # What files hold beyond the index is left over, too.
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    if len(tensors) < sum(map(len, headers.values())):
        twice = [name for name, count in Counter(chain.from_iterable(headers.values())).items() if count > 1]
        raise CheckpointError(f"{path} has tensors in more than one file: {_first(twice)}")
    return tensors
