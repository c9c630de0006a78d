"""A block as tiers store it: a head that says what it is, and its bytes.

A head is a prefix of 96 bytes, the block's header, and zeros up to a multiple of 64 bytes. What each part
vouches for, from the inside out:

    name    digest of the header: its tokens, tenant, model, layout, dtype
    digest  of the name and the data
    seal    of where the record lies and all of the prefix: lengths, key, name and digest

So 96 bytes tell whether a record is ours before a length in it is believed.
"""

from __future__ import annotations

import struct
from hmac import compare_digest
from typing import Literal, NamedTuple, Protocol

from xxhash import xxh3_128

from sagellm.core.errors import InvalidInputError
from sagellm.core.kv_block import BlockHeader

_PREFIX = struct.Struct("<4sIQ8s16s32s")  # magic, header bytes, data bytes, id of the key, name, digest
_MAGIC = b"sKV2"
_OLDER_MAGIC = b"sKVr"
_SEAL_BYTES = 24
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 1 << 20
PREFIX_BYTES = _PREFIX.size + _SEAL_BYTES


class Sealing(Protocol):
    """What a record is vouched for with: a StoreKey, or Checksums where it stays in memory."""

    @property
    def id(self) -> bytes:
        """Eight bytes that tell keys apart."""

    def digest(self, purpose: bytes, *parts: bytes | memoryview, size: int) -> bytes:
        """Return `size` bytes over the parts."""

    def cipher(self, nonce: bytes, data: bytes) -> bytes:
        """Make bytes unreadable, or readable again."""


class Checksums:
    """xxh3 without a key, and headers as they are: for memory of this process, against errors alone."""

    id = bytes(8)

    def digest(self, purpose: bytes, *parts: bytes | memoryview, size: int) -> bytes:
        """Return xxh3's 16 bytes, twice where more are wanted."""
        state = xxh3_128(purpose)
        for part in parts:
            state.update(part)
        return (2 * state.digest())[:size]

    def cipher(self, nonce: bytes, data: bytes) -> bytes:
        """Return the data."""
        del nonce
        return data


class Prefix(NamedTuple):
    """The lengths of a record whose prefix is sealed, and what it must come to."""

    num_head_bytes: int
    num_header_bytes: int
    num_data_bytes: int
    name: bytes
    digest: bytes


class Head(NamedTuple):
    """What a head says."""

    header: BlockHeader
    num_data_bytes: int
    digest: bytes
    num_head_bytes: int


class RecordFormat:
    """Writes and reads heads, sealed by one key or with checksums."""

    def __init__(self, sealing: Sealing) -> None:
        self._sealing = sealing

    def name_of(self, header: BlockHeader) -> bytes:
        """Return the 16 bytes that name a block; without the key nobody can try tokens against them."""
        return self._sealing.digest(b"name", header.encode(), size=16)

    def digest_of(self, header: BlockHeader, data: memoryview) -> bytes:
        """Return the 32 bytes that vouch for a block's data."""
        return self._sealing.digest(b"data", self.name_of(header), data, size=32)

    def encode_head(self, header: BlockHeader, num_data_bytes: int, digest: bytes, place: int) -> bytes:
        """Return the head of a record; `place` is where it lies: copied elsewhere its seal is wrong."""
        encoded, name = header.encode(), self.name_of(header)
        bare = _PREFIX.pack(_MAGIC, len(encoded), num_data_bytes, self._sealing.id, name, digest)
        head = bare + self._seal(bare, place) + self._sealing.cipher(name, encoded)
        return head + bytes(-len(head) % _ALIGNMENT)

    def read_prefix(self, prefix: bytes, place: int) -> Prefix | None:
        """Read the first bytes of a head; None if they are not sealed for this place."""
        if len(prefix) < PREFIX_BYTES or prefix[:4] != _MAGIC:
            return None
        bare, seal = prefix[: _PREFIX.size], prefix[_PREFIX.size : PREFIX_BYTES]
        _, num_header_bytes, num_data_bytes, key_id, name, digest = _PREFIX.unpack(bare)
        if key_id != self._sealing.id or num_header_bytes > _MAX_HEADER_BYTES:
            return None
        if not compare_digest(seal, self._seal(bare, place)):
            return None
        return Prefix(_head_bytes(num_header_bytes), num_header_bytes, num_data_bytes, name, digest)

    def decode_head(self, head: bytes, place: int) -> Head | None:
        """Read a head; None if any of it is not what `encode_head` wrote for this place."""
        prefix = self.read_prefix(head, place)
        if prefix is None or prefix.num_head_bytes != len(head):
            return None
        end = PREFIX_BYTES + prefix.num_header_bytes
        try:
            header = BlockHeader.decode(self._sealing.cipher(prefix.name, head[PREFIX_BYTES:end]))
        except InvalidInputError:
            return None
        if not compare_digest(self.name_of(header), prefix.name) or any(head[end:]):
            return None
        return Head(header, prefix.num_data_bytes, prefix.digest, len(head))

    def refusal_of(self, prefix: bytes) -> Literal["foreign", "corrupt"] | None:
        """Say why a prefix that `read_prefix` refused is none: None if it does not even begin like one.

        Foreign: by its own account it is of another key, or of an older format.
        """
        if prefix[:4] == _OLDER_MAGIC:
            return "foreign"
        if prefix[:4] != _MAGIC or len(prefix) < PREFIX_BYTES:
            return None
        return "corrupt" if _PREFIX.unpack_from(prefix)[3] == self._sealing.id else "foreign"

    def _seal(self, bare: bytes, place: int) -> bytes:
        return self._sealing.digest(b"head", place.to_bytes(8, "little"), bare, size=_SEAL_BYTES)


def num_head_bytes(header: BlockHeader) -> int:
    """Return how long the head of a block's record is."""
    return _head_bytes(len(header.encode()))


def _head_bytes(num_header_bytes: int) -> int:
    num_bytes = PREFIX_BYTES + num_header_bytes
    return num_bytes + -num_bytes % _ALIGNMENT
