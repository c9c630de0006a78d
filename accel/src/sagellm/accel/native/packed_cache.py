"""Packed weights that stay in a folder: a later load maps them instead of reading and packing a checkpoint.

A mapped file needs no memory of its own to be found and cleared, and processes that map it share its pages.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.accel.native.memory import Bytes
from sagellm.core import ConfigError, get_logger
from sagellm.core.protocols.checkpoint_format import StoredTensor

logger = get_logger(__name__)

_FORMAT = b"sagellm packed 1"
_END = struct.Struct("<q16s")  # the length of the JSON before it, and the format
_ALIGNMENT = 64
_HEAD_BYTES = 1 << 20  # of a file, which hold its header
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class PackedWeights:
    """What a packer has made: matrices in one piece of memory, vectors, and the errors of its quantizer."""

    memory: Bytes
    vectors: Sequence[npt.NDArray[np.generic]]
    errors: Sequence[float]


class PackedCache:
    """The packed weights of one model in a folder, under a key of all that they depend on."""

    def __init__(self, folder: str | os.PathLike[str], key: str) -> None:
        self._key = key
        self._file = Path(folder).expanduser() / f"{key}.packed"
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"model.packed_cache is {os.fspath(folder)!r}, which cannot be made: {error.strerror}; "
                "name another folder"
            ) from error

    def read(self, num_bytes: int) -> PackedWeights | None:
        """Map the weights, whose matrices take `num_bytes`; None if there are none, or only damaged ones."""
        try:
            found = _read(self._file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not read, and written anew: %s", self._file, error)
            return None
        if found.memory.nbytes != num_bytes:
            logger.warning("%s is of another size than this model, and written anew", self._file)
            return None
        return found

    def write(self, packed: PackedWeights) -> None:
        """Keep weights; a failure, such as a full disk, is a warning."""
        try:
            with NamedTemporaryFile(dir=self._file.parent, prefix=f"{self._key}.", delete=False) as file:
                try:
                    _write(file, packed)
                    file.flush()
                    os.replace(file.name, self._file)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            logger.warning("packed weights are not kept in %s: %s", self._file.parent, error.strerror)


def key_of(library: Path, form: Iterable[object], tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the key of weights that a library packs in this form; None if they come from no files.

    It depends on the library's bytes and, for each file, on name, size, time of change, header and samples.
    """
    digest = hashlib.sha256(library.read_bytes())
    files: set[Path] = set()
    for part in form:
        digest.update(repr(part).encode())
    for name, tensor in tensors.items():
        files.add(tensor.path)
        digest.update(repr((name, tensor.dtype, tensor.shape, tensor.form)).encode())
    for path in sorted(files):
        if not path.is_file():
            return None
        _add_file(digest, path)
    return digest.hexdigest()[:32] if files else None


def _add_file(digest: Any, path: Path) -> None:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
        digest.update(file.read(_HEAD_BYTES))
        for index in range(_SAMPLES):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, status.st_size * index // _SAMPLES))


def _write(file: Any, packed: PackedWeights) -> None:
    placed: list[tuple[str, list[int], int]] = []
    file.write(packed.memory.data)
    position = packed.memory.nbytes
    for vector in packed.vectors:
        gap = -position % _ALIGNMENT
        file.write(bytes(gap))
        position += gap
        placed.append((vector.dtype.str, list(vector.shape), position))
        file.write(np.ascontiguousarray(vector).data)
        position += vector.nbytes
    facts = {"num_bytes": packed.memory.nbytes, "vectors": placed, "errors": list(packed.errors)}
    text = json.dumps(facts).encode()
    file.write(text)
    file.write(_END.pack(len(text), _FORMAT))


def _read(path: Path) -> PackedWeights:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "getuid") and status.st_uid not in (0, os.getuid()):
            raise ValueError("it belongs to another user")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    length, form = _END.unpack(mapped[-_END.size :])
    text_at = len(mapped) - _END.size - length
    if form != _FORMAT or not 0 <= length <= text_at:
        raise ValueError("it is cut off, or something else")
    facts = json.loads(mapped[text_at : text_at + length])
    vectors = [
        np.frombuffer(mapped, dtype, int(np.prod(shape, dtype=np.int64)), offset).reshape(shape)
        for dtype, shape, offset in facts["vectors"]
    ]
    memory = np.frombuffer(mapped, np.uint8, facts["num_bytes"])
    return PackedWeights(memory, vectors, [float(each) for each in facts["errors"]])
