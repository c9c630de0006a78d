"""What a GGUF file says it holds, checked against the file, without reading any weights.

Written out here and not left to the package gguf: its reader makes numpy arrays of each of the 300,000 texts
of a vocabulary, one by one, which takes seconds, and bounds nothing that a hostile file claims. It needs no
dependency either; the tests write files by that package, too.

Layout, little endian: "GGUF"; u32 version; u64 number of tensors; u64 number of entries; the entries, each a
name, u32 type and value; the tensors, each a name, u32 number of dimensions, u64 dimensions (the innermost
first), u32 type, u64 offset; padding to `general.alignment`; then the tensors' bytes. A text is u64 bytes
and UTF-8, an array u32 type, u64 length and its values.
Source: the format's description at github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct, error as StructError
from typing import Any

import numpy as np

from sagellm.core import CheckpointError
from sagellm.engines.config.shown import shown
from sagellm.engines.loading.gguf_types import BLOCKS, READ, TYPES
from sagellm.engines.loading.json_file import check_file
from sagellm.engines.loading.safetensors_header import PlacedTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 128 << 20  # a vocabulary of 262,144 tokens with merges has 12 MB
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_NAME_BYTES = 1 << 10
_MAX_TEXT_BYTES = 2 << 20  # of an entry; a chat template may have 1 MiB
_MAX_LENGTH = 1 << 21  # of an array: a vocabulary and its merges may have half as many each
_MAX_DIMENSIONS = 4  # ggml's own limit
_MAX_ALIGNMENT = 1 << 20
_U32, _U64 = Struct("<I"), Struct("<Q")
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT, _ARRAY = 8, 9
_OF_TOKENIZERS = ("tokenizer.ggml.merges", "tokenizer.ggml.scores")
"""Long arrays that only a tokenizer is made of."""


class _DamagedError(Exception):
    """The header contradicts itself or its limits."""


@dataclass(frozen=True)
class GGUFHeader:
    """The entries of a file by name, and its tensors by llama.cpp's names, outermost dimension first.

    An array of texts is a list of their bytes, an array of numbers a list of Python's; a number of 32 bits is
    the shortest one that rounds to it.
    """

    path: Path
    entries: Mapping[str, Any]
    tensors: Mapping[str, PlacedTensor]


def read_gguf_header(path: Path, *, with_vocabulary: bool = False) -> GGUFHeader:
    """Return entries and tensors of a file. Merges and scores are left out unless asked for.

    Raises CheckpointError if the file is cut off, if types, sizes and offsets do not agree, or for a tensor
    of a type that is not read.
    """
    check_file(path)
    try:
        with open(path, "rb") as file:
            file_bytes = file.seek(0, 2)
            if file_bytes < 24:
                raise _DamagedError(f"it has {file_bytes} bytes, and a header alone has 24")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _read(path, _Cursor(mapped, with_vocabulary=with_vocabulary), file_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (_DamagedError, StructError, UnicodeDecodeError) as error:
        reason = "its header is cut off" if isinstance(error, StructError) else error
        raise CheckpointError(f"{path} is not a GGUF file, or damaged: {reason}; fetch it again") from error


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap, *, with_vocabulary: bool) -> None:
        self._data, self.position = data, 0
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._with_vocabulary = with_vocabulary

    def u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def text(self, what: str, most: int = _MAX_NAME_BYTES) -> bytes:
        length = self.u64()
        if length > most:
            raise _DamagedError(f"{what} would have {length} bytes, and {most} is allowed")
        return self._take(length)

    def value(self, name: str) -> Any:
        """Return the value of an entry, None for an array that is left out."""
        kind = self.u32()
        if kind == _TEXT:
            return self.text(name, _MAX_TEXT_BYTES).decode(errors="replace")
        if kind != _ARRAY:
            return _plain(self._numbers(name, kind, 1))[0]
        kind, length = self.u32(), self.u64()
        if length > _MAX_LENGTH:
            raise _DamagedError(f"{name} would have {length} values, and {_MAX_LENGTH} is allowed")
        is_wanted = self._with_vocabulary or name not in _OF_TOKENIZERS
        if kind == _TEXT:
            return self._texts(length, is_wanted=is_wanted)
        numbers = self._numbers(name, kind, length)
        return _plain(numbers) if is_wanted else None

    def _texts(self, length: int, *, is_wanted: bool) -> list[bytes] | None:
        """Read an array of texts; written out, because a vocabulary has some 300,000."""
        data, position, end, unpack = self._data, self.position, self._end, _U64.unpack_from
        texts: list[bytes] = []
        for _ in range(length):
            if position + 8 > end:
                raise StructError
            (size,) = unpack(data, position)
            position += 8 + size
            if position > end:
                raise StructError
            if is_wanted:
                texts.append(data[position - size : position])
        self.position = position
        return texts if is_wanted else None

    def _numbers(self, name: str, kind: int, length: int) -> Any:
        if kind not in _NUMBERS:
            raise _DamagedError(f"{name} has the type {kind}, which is unknown or an array of arrays")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(length * dtype.itemsize), dtype)

    def _take(self, num_bytes: int) -> bytes:
        begin = self.position
        self.position += num_bytes
        if self.position > self._end:
            raise StructError
        return self._data[begin : self.position]


def _plain(numbers: Any) -> list[Any]:
    if numbers.dtype == np.float32 and len(numbers) < 1 << 12:  # 1e-5, not 9.999999747378752e-06
        return [float(str(number)) for number in numbers]
    values: list[Any] = numbers.tolist()
    return values


def _read(path: Path, cursor: _Cursor, file_bytes: int) -> GGUFHeader:
    magic, version = cursor.u32().to_bytes(4, "little"), cursor.u32()
    if magic != _MAGIC:
        raise _DamagedError(f"it begins with {magic!r} instead of {_MAGIC!r}")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        reason = "is in big endian" if swapped in _VERSIONS else f"is of version {version}"
        raise CheckpointError(
            f"{path} {reason}; versions {' and '.join(map(str, _VERSIONS))} in little endian are read: "
            f"convert the model again"
        )
    num_tensors, num_entries = cursor.u64(), cursor.u64()
    if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
        raise _DamagedError(
            f"it would have {num_tensors} tensors and {num_entries} entries; at most {_MAX_TENSORS} and "
            f"{_MAX_ENTRIES} are read"
        )
    entries: dict[str, Any] = {}
    for _ in range(num_entries):
        name = cursor.text("the name of an entry").decode()
        if name in entries:
            raise _DamagedError(f"it has the entry {shown(name)} twice")
        entries[name] = cursor.value(name)
    stored = [_stored_tensor(path, cursor) for _ in range(num_tensors)]
    alignment = entries.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise _DamagedError(f"general.alignment is {shown(alignment)}")
    begin = -(-cursor.position // alignment) * alignment
    tensors = dict(_placed(stored, begin, alignment, file_bytes))
    if len(tensors) < len(stored):
        raise _DamagedError("it has two tensors of one name")
    _check_overlaps(tensors)
    return GGUFHeader(path, entries, tensors)


def _stored_tensor(path: Path, cursor: _Cursor) -> tuple[str, PlacedTensor]:
    """Read a tensor's entry; its offset counts from the first tensor's bytes."""
    name = cursor.text("the name of a tensor").decode()
    num_dimensions = cursor.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise _DamagedError(f"tensor {shown(name)} has {num_dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
    kind, offset = cursor.u32(), cursor.u64()
    dtype = TYPES.get(kind, f"number {kind}")
    if dtype not in READ:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} is of the type {dtype}, which is not read; {', '.join(READ)} are"
        )
    inputs, num_bytes = BLOCKS[dtype]
    if any(not 0 < size < 1 << 40 for size in shape) or prod(shape) >= 1 << 48:
        raise _DamagedError(f"tensor {shown(name)} has the shape {list(shape)}")
    if inputs > 1 and (len(shape) != 2 or shape[-1] % inputs):
        raise _DamagedError(
            f"tensor {shown(name)} of {dtype} has the shape {list(shape)}; its rows must be a multiple of "
            f"{inputs} long"
        )
    size = prod(shape) // inputs * num_bytes
    return name, PlacedTensor(path=path, dtype=dtype, shape=shape, num_bytes=size, offset=offset)


def _placed(
    stored: Iterable[tuple[str, PlacedTensor]], begin: int, alignment: int, file_bytes: int
) -> Iterator[tuple[str, PlacedTensor]]:
    """Yield the tensors with offsets from the start of the file."""
    for name, tensor in stored:
        offset = begin + tensor.offset
        if tensor.offset % alignment:
            raise _DamagedError(
                f"tensor {shown(name)} is at byte {tensor.offset}, not a multiple of {alignment}"
            )
        if offset + tensor.num_bytes > file_bytes:
            raise _DamagedError(
                f"tensor {shown(name)} would end at byte {offset + tensor.num_bytes} of {file_bytes}: the "
                f"file is cut off"
            )
        yield (
            name,
            PlacedTensor(
                path=tensor.path,
                dtype=tensor.dtype,
                shape=tensor.shape,
                num_bytes=tensor.num_bytes,
                offset=offset,
            ),
        )


def _check_overlaps(tensors: Mapping[str, PlacedTensor]) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset < end:
            raise _DamagedError(f"tensor {shown(name)} overlaps another")
        end = tensor.offset + tensor.num_bytes
