"""What a safetensors file says it holds, checked against the file, without reading any weights.

The library safetensors does not give offsets, which mapping needs, nor bounds what a hostile header costs.

Layout: 8 bytes length of the header, little endian; the header, JSON; then the tensors' bytes.
Source: the format's description at huggingface.co/docs/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from sagellm.core import CheckpointError, ConfigError, StoredTensor
from sagellm.engines.config.bounded_json import parse_json
from sagellm.engines.config.shown import shown
from sagellm.engines.loading.json_file import check_file

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_LENGTH_BYTES = 8
_MAX_VALUES = 1_500_000  # about nine per tensor; a model of 512 unmerged experts has 100,000 in all its files
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_HEADER_BYTES = 32 << 20  # a third of the format's own limit


@dataclass(frozen=True, kw_only=True)
class PlacedTensor(StoredTensor):
    """One tensor of a file, and the location of its bytes."""

    offset: int  # from the start of the file


def read_header(path: Path) -> dict[str, PlacedTensor]:
    """Return the tensors of a file by name.

    Raises CheckpointError if the file is cut off, or if sizes, types and offsets do not agree.
    """
    header = _read(path)
    tensors = {name: _stored_tensor(path, name, entry, header.end) for name, entry in header.entries.items()}
    _check_extent(path, tensors, header.end, header.file_bytes)
    return tensors


def read_metadata(path: Path) -> Mapping[str, str]:
    """Return what the writer of a file says of it. Raises CheckpointError as `read_header` does."""
    return _read(path).metadata


@dataclass(frozen=True)
class _Header:
    entries: Mapping[str, Any]
    metadata: Mapping[str, str]
    end: int
    file_bytes: int


def _read(path: Path) -> _Header:
    try:
        check_file(path)
        with open(path, "rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= header_bytes <= file_bytes - _LENGTH_BYTES:
                raise CheckpointError(
                    f"{path} is not a safetensors file, or cut off: {file_bytes} bytes, of which the header "
                    f"would be {header_bytes}; fetch it again"
                )
            if header_bytes > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} has a header of {header_bytes} bytes; it may have at most {_MAX_HEADER_BYTES}"
                )
            text = file.read(header_bytes)
            header = parse_json(text, max_values=_MAX_VALUES, has_unique_names=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except ConfigError as error:
        raise CheckpointError(f"{path} has a damaged header: {error}; fetch it again") from error
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise CheckpointError(
            f"{path} has a damaged header: it is not a JSON object from its first byte; fetch it again"
        )
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(
            f"{path} has a damaged header: its __metadata__ is not of texts; fetch it again"
        )
    try:
        "".join((*header, *metadata, *metadata.values())).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path} has a damaged header: {error}; fetch it again") from error
    return _Header(header, metadata, _LENGTH_BYTES + header_bytes, file_bytes)


def _stored_tensor(path: Path, name: str, entry: Any, begin: int) -> PlacedTensor:
    if not isinstance(entry, dict):
        raise _damaged(path, name, f"is {shown(entry)}; it must be an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _damaged(path, name, f"has the type {shown(dtype)}, which is not known")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    # Multiplying more or larger dimensions could take minutes.
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _damaged(path, name, f"has the shape {shown(shape)}, which no tensor can have")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, name, f"has the data_offsets {shown(offsets)}; they must be two integers from 0")
    first, last = offsets
    if last - first != prod(shape) * ITEM_BYTES[dtype]:
        raise _damaged(path, name, f"of {dtype} {shape} cannot lie in bytes {first} to {last}")
    return PlacedTensor(
        path=path, dtype=dtype, shape=tuple(shape), num_bytes=last - first, offset=begin + first
    )


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Say whether this is a list of sizes or offsets.

    2.0, "2" and true are not, though Python would convert them.
    """
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _damaged(path: Path, name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {shown(name)} {problem}; fetch it again")


def _check_extent(path: Path, tensors: Mapping[str, PlacedTensor], begin: int, file_bytes: int) -> None:
    """Check that the tensors fill the rest of the file, without a gap or an overlap."""
    position = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != position:
            raise _damaged(path, name, "overlaps another or leaves a gap")
        position += tensor.num_bytes
    if position != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, its header describes {position}: it is "
            f"{'cut off' if file_bytes < position else 'too long'}; fetch it again"
        )
