"""A block as tiers store it: a head that identifies it, and its bytes.

A head is a prefix of 96 bytes, the encrypted header, and zeros up to a multiple of 64 bytes. The prefix has
three digests, from the inside out:

    name    of the header: tokens, tenant, model, layout, dtype
    digest  of the name and the data
    seal    of the record's offset and the rest of the prefix: lengths, key id, name and digest

So 96 bytes authenticate a record before any length in it is trusted.
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


class Sealer(Protocol):
    """Authenticates and encrypts records: a StoreKey, or Checksums for those that stay in memory."""

    @property
    def id(self) -> bytes:
        """Eight bytes that tell keys apart."""

    def digest(self, purpose: bytes, *parts: bytes | memoryview, size: int) -> bytes:
        """Return a digest of `size` bytes of the joined parts."""

    def cipher(self, nonce: bytes, data: bytes) -> bytes:
        """Encrypt or decrypt."""


class Checksums:
    """xxh3 without a key or encryption: detects errors, not forgery, in this process's own memory."""

    id = bytes(8)

    def digest(self, purpose: bytes, *parts: bytes | memoryview, size: int) -> bytes:
        """Return xxh3's 16 bytes, repeated if `size` is larger."""
        state = xxh3_128(purpose)
        for part in parts:
            state.update(part)
        return (2 * state.digest())[:size]

    def cipher(self, nonce: bytes, data: bytes) -> bytes:
        """Return the data unchanged."""
        del nonce
        return data


class Prefix(NamedTuple):
    """The authenticated prefix of a record: its lengths, and the digests that the rest must match."""

    num_head_bytes: int
    num_header_bytes: int
    num_data_bytes: int
    name: bytes
    digest: bytes


class Head(NamedTuple):
    """A decoded head."""

    header: BlockHeader
    num_data_bytes: int
    digest: bytes


class RecordFormat:
    """Encodes and decodes heads with one key, or with checksums."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    def name_of(self, header: BlockHeader) -> bytes:
        """Return the 16 bytes that name a block; without the key no guess of tokens can be verified."""
        return self._sealer.digest(b"name", header.encode(), size=16)

    def digest_of(self, header: BlockHeader, data: memoryview) -> bytes:
        """Return the 32-byte digest of a block's data and name."""
        return self._sealer.digest(b"data", self.name_of(header), data, size=32)

    def encode_head(self, header: BlockHeader, num_data_bytes: int, digest: bytes, offset: int) -> bytes:
        """Return the head of a record at this offset; copied to another one its seal is invalid."""
        encoded, name = header.encode(), self.name_of(header)
        bare = _PREFIX.pack(_MAGIC, len(encoded), num_data_bytes, self._sealer.id, name, digest)
        head = bare + self._seal(bare, offset) + self._sealer.cipher(name, encoded)
        return head + bytes(-len(head) % _ALIGNMENT)

    def read_prefix(self, prefix: bytes, offset: int) -> Prefix | None:
        """Read the first bytes of a head; None if their seal is not valid at this offset."""
        if len(prefix) < PREFIX_BYTES or prefix[:4] != _MAGIC:
            return None
        bare, seal = prefix[: _PREFIX.size], prefix[_PREFIX.size : PREFIX_BYTES]
        _, num_header_bytes, num_data_bytes, key_id, name, digest = _PREFIX.unpack(bare)
        if key_id != self._sealer.id or num_header_bytes > _MAX_HEADER_BYTES:
            return None
        if not compare_digest(seal, self._seal(bare, offset)):
            return None
        return Prefix(_head_bytes(num_header_bytes), num_header_bytes, num_data_bytes, name, digest)

    def decode_head(self, head: bytes, offset: int) -> Head | None:
        """Read a head; None unless all of it is what `encode_head` returns for this offset."""
        prefix = self.read_prefix(head, offset)
        if prefix is None or prefix.num_head_bytes != len(head):
            return None
        end = PREFIX_BYTES + prefix.num_header_bytes
        try:
            header = BlockHeader.decode(self._sealer.cipher(prefix.name, head[PREFIX_BYTES:end]))
        except InvalidInputError:
            return None
        if not compare_digest(self.name_of(header), prefix.name) or any(head[end:]):
            return None
        return Head(header, prefix.num_data_bytes, prefix.digest)

    def refusal_of(self, prefix: bytes) -> Literal["foreign", "corrupt"] | None:
        """Say why `read_prefix` refused a prefix; None if it does not look like one.

        "foreign" means that its key id or magic number is of another key or an older format.
        """
        if prefix[:4] == _OLDER_MAGIC:
            return "foreign"
        if prefix[:4] != _MAGIC or len(prefix) < PREFIX_BYTES:
            return None
        return "corrupt" if _PREFIX.unpack_from(prefix)[3] == self._sealer.id else "foreign"

    def _seal(self, bare: bytes, offset: int) -> bytes:
        return self._sealer.digest(b"head", offset.to_bytes(8, "little"), bare, size=_SEAL_BYTES)


def num_head_bytes(header: BlockHeader) -> int:
    """Return the length of the head of a block's record."""
    return _head_bytes(len(header.encode()))


def _head_bytes(num_header_bytes: int) -> int:
    num_bytes = PREFIX_BYTES + num_header_bytes
    return num_bytes + -num_bytes % _ALIGNMENT
