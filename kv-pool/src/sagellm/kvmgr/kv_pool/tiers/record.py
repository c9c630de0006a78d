"""A block as tiers store it: a head that says what it is, and its bytes."""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from sagellm.core.errors import InvalidInputError
from sagellm.core.kv_block import BlockHeader

_PREFIX = struct.Struct("<4sIQ16sQQ")  # magic, header bytes, data bytes, checksum of the data, seal, reserved
_MAGIC = b"sKVr"
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 1 << 22
PREFIX_BYTES = _PREFIX.size


class Head(NamedTuple):
    """What a head says."""

    header: BlockHeader
    num_data_bytes: int
    checksum: bytes
    num_head_bytes: int


def checksum_of(data: memoryview) -> bytes:
    """Return the xxh3 checksum of a block's bytes, 16 bytes."""
    return xxh3_128_digest(data)


def num_head_bytes(header: BlockHeader) -> int:
    """Return how long the head of a block's record is."""
    num_bytes = PREFIX_BYTES + len(header.encode())
    return num_bytes + -num_bytes % _ALIGNMENT


def encode_head(header: BlockHeader, num_data_bytes: int, checksum: bytes, seed: int) -> bytes:
    """Return the head of a record: prefix, header and zeros up to a multiple of 64 bytes.

    `seed` is where the record lies, in what file: a head that was copied elsewhere has a wrong seal.
    """
    encoded = header.encode()
    bare = _PREFIX.pack(_MAGIC, len(encoded), num_data_bytes, checksum, 0, 0)
    seal = xxh3_64_intdigest(bare + encoded, seed)
    prefix = _PREFIX.pack(_MAGIC, len(encoded), num_data_bytes, checksum, seal, 0)
    head = prefix + encoded
    return head + bytes(-len(head) % _ALIGNMENT)


def read_prefix(prefix: bytes) -> int | None:
    """Return how many bytes a head has that begins so; None if none does."""
    if len(prefix) < PREFIX_BYTES or prefix[:4] != _MAGIC:
        return None
    num_header_bytes: int = _PREFIX.unpack_from(prefix)[1]
    if num_header_bytes > _MAX_HEADER_BYTES:
        return None
    num_bytes = PREFIX_BYTES + num_header_bytes
    return num_bytes + -num_bytes % _ALIGNMENT


def decode_head(head: bytes, seed: int) -> Head | None:
    """Read a head; None if any of it is not what `encode_head` wrote for this place."""
    if read_prefix(head) != len(head):
        return None
    _, num_header_bytes, num_data_bytes, checksum, _, _ = _PREFIX.unpack_from(head)
    try:
        header = BlockHeader.decode(head[PREFIX_BYTES : PREFIX_BYTES + num_header_bytes])
    except InvalidInputError:
        return None
    if encode_head(header, num_data_bytes, checksum, seed) != head:
        return None
    return Head(header, num_data_bytes, checksum, len(head))
