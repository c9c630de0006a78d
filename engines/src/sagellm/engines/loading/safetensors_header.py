"""What a safetensors file says it holds, checked against the file, without reading any weights.

Layout: 8 bytes length of the header, little endian; the header, JSON; then the tensors' bytes.
Source: the format's description at huggingface.co/docs/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sagellm.core import CheckpointError, ConfigError, StoredTensor
from sagellm.engines.config.bounded_json import parse_json
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
_MAX_VALUES = 4_000_000  # about ten per tensor
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_SHOWN = 64  # characters of a value in a message
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, kw_only=True)
class PlacedTensor(StoredTensor):
    """One tensor of a file, and the location of its bytes."""

    offset: int  # from the start of the file


def read_header(path: Path) -> dict[str, PlacedTensor]:
    """Return the tensors of a file by name.

    Raises CheckpointError if the file is cut off, or if sizes, types and offsets do not agree.
    """
    try:
        check_file(path)
        with open(path, "rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            limit = min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES)
            if header_bytes < 2 or header_bytes > limit:
                raise CheckpointError(
                    f"{path} is not a safetensors file, or cut off: {file_bytes} bytes, of which the header "
                    f"would be {header_bytes}; fetch it again"
                )
            header = parse_json(file.read(header_bytes), max_values=_MAX_VALUES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except ConfigError as error:
        raise CheckpointError(f"{path} has a damaged header: {error}; fetch it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header: it is no JSON object; fetch it again")
    begin = _LENGTH_BYTES + header_bytes
    tensors = {
        name: _stored_tensor(path, name, entry, begin)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_extent(path, tensors, begin, file_bytes)
    return tensors


def _stored_tensor(path: Path, name: str, entry: Mapping[str, Any], begin: int) -> PlacedTensor:
    try:
        dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: the header's entry of {name!r} is damaged; fetch it again") from error
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        shown = str(dtype)[:_MAX_SHOWN]
        raise CheckpointError(f"{path}: tensor {name!r} has the type {shown}, which is not known")
    # Multiplying more or larger dimensions could take minutes.
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size < 1 << 63 for size in shape):
        raise CheckpointError(f"{path}: tensor {name!r} has a shape that no tensor can have; fetch it again")
    if last - first != prod(shape) * ITEM_BYTES[dtype] or first < 0:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} {shape} cannot lie in bytes {first} to {last}; "
            f"fetch it again"
        )
    return PlacedTensor(path=path, dtype=dtype, shape=shape, num_bytes=last - first, offset=begin + first)


def _check_extent(path: Path, tensors: Mapping[str, PlacedTensor], begin: int, file_bytes: int) -> None:
    """Check that the tensors fill the rest of the file, without a gap or an overlap."""
    position = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != position:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps another or leaves a gap; fetch it again")
        position += tensor.num_bytes
    if position != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, its header describes {position}: it is "
            f"{'cut off' if file_bytes < position else 'too long'}; fetch it again"
        )
