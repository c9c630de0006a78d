"""The identity of a KV block outside the tree that made it: one header for memory, disk and wire."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

from sagellm.core.errors import InvalidInputError
from sagellm.core.namespace import Namespace
from sagellm.core.tokens import TokenIds

HASH_BYTES = 16
ROOT_HASH = bytes(HASH_BYTES)
"""The parent hash of a block that begins a prompt."""

_MAGIC = b"sKV1"
_MAX_FIELD_BYTES = 1 << 24


class BlockKey(NamedTuple):
    """Names the content of a block: its KV group and its chain hash."""

    group: int
    hash: bytes


class KVIdentity(NamedTuple):
    """What must also be equal for KV of equal tokens to be interchangeable."""

    model_fingerprint: str = ""
    layout: str = ""  # KVLayout.signature
    dtype: str = ""


UNNAMED = KVIdentity()
"""The identity of KV that is never kept outside its cache."""


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """Everything that must be equal for a stored block to be the wanted one.

    The chain hash covers the parent's hash, so equal keys mean equal prefixes. A hit still
    compares `token_ids`: a hash alone never decides.
    """

    parent_hash: bytes
    token_ids: TokenIds
    namespace: Namespace
    model_fingerprint: str
    layout: str  # KVLayout.signature
    dtype: str
    group: int = 0

    @cached_property
    def hash(self) -> bytes:
        """blake2b, 16 bytes, over the parent's hash and length-prefixed typed fields."""
        return blake2b(self.encode(), digest_size=HASH_BYTES).digest()

    @property
    def key(self) -> BlockKey:
        """The key under which tiers and peers keep the block."""
        return BlockKey(self.group, self.hash)

    @classmethod
    def of(
        cls, parent_hash: bytes, token_ids: TokenIds, namespace: Namespace, identity: KVIdentity
    ) -> BlockHeader:
        """Make the header of a block of the only KV group."""
        return cls(
            parent_hash=parent_hash,
            token_ids=token_ids,
            namespace=namespace,
            model_fingerprint=identity.model_fingerprint,
            layout=identity.layout,
            dtype=identity.dtype,
        )

    def encode(self) -> bytes:
        """Return the header as bytes: magic, group, then each field with its length before it."""
        fields = (
            self.parent_hash,
            self.token_ids.data,
            *(part.encode() for part in self.namespace),
            self.model_fingerprint.encode(),
            self.layout.encode(),
            self.dtype.encode(),
        )
        parts = [_MAGIC, struct.pack("<I", self.group)]
        for field in fields:
            parts += (struct.pack("<I", len(field)), field)
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> BlockHeader:
        """Read what `encode` wrote. Raises InvalidInputError for anything else."""
        if data[:4] != _MAGIC or len(data) < 8:
            raise InvalidInputError("not a KV block header: wrong magic")
        (group,) = struct.unpack_from("<I", data, 4)
        fields = _split_fields(data, 8)
        if len(fields) != 8 or len(fields[0]) != HASH_BYTES:
            raise InvalidInputError("not a KV block header: wrong number or size of fields")
        try:
            texts = [field.decode() for field in fields[2:]]
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"not a KV block header: {error}") from error
        return cls(
            parent_hash=fields[0],
            token_ids=TokenIds(fields[1]),
            namespace=Namespace(*texts[:3]),
            model_fingerprint=texts[3],
            layout=texts[4],
            dtype=texts[5],
            group=group,
        )


def headers_of(
    token_ids: TokenIds, block_size: int, namespace: Namespace, identity: KVIdentity
) -> list[BlockHeader]:
    """Return the headers of the full blocks of a prompt. About 6 µs per block."""
    headers: list[BlockHeader] = []
    parent_hash = ROOT_HASH
    for end in range(block_size, len(token_ids) + 1, block_size):
        header = BlockHeader.of(parent_hash, token_ids[end - block_size : end], namespace, identity)
        parent_hash = header.hash
        headers.append(header)
    return headers


def _split_fields(data: bytes, position: int) -> list[bytes]:
    fields = []
    while position < len(data):
        if position + 4 > len(data):
            raise InvalidInputError("KV block header is cut off inside a length")
        (size,) = struct.unpack_from("<I", data, position)
        position += 4
        if size > _MAX_FIELD_BYTES or position + size > len(data):
            raise InvalidInputError(f"KV block header: a field of {size} bytes does not fit")
        fields.append(data[position : position + size])
        position += size
    return fields
