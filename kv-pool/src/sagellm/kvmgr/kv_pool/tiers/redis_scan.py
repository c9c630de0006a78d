"""What a Redis or Valkey server has under a prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.kvmgr.kv_pool.tiers.record import decode_head, read_prefix

if TYPE_CHECKING:
    from redis import Connection

_MAX_HEAD_BYTES = 1 << 16
_BATCH = 1000
_PATTERN_BYTES = re.compile(rb"[*?\[\]^\\-]")
"""What the server takes for a part of a pattern unless it follows a backslash."""


def name_of(prefix: bytes, key: BlockKey) -> bytes:
    """Return the name under which a block is stored."""
    return prefix + key.hash.hex().encode() + b".%d" % key.group


def find_stored(connection: Connection, prefix: bytes) -> Iterator[tuple[BlockHeader, int]]:
    """Yield the blocks with their bytes by the heads of what is stored; all else is passed over.

    Raises what the connection raises.
    """
    pattern = _PATTERN_BYTES.sub(rb"\\\g<0>", prefix) + b"*"
    cursor = b"0"
    while True:
        connection.send_command("SCAN", cursor, "MATCH", pattern, "COUNT", _BATCH)
        cursor, names = connection.read_response(disable_decoding=True)
        if names:
            commands = [("GETRANGE", name, 0, _MAX_HEAD_BYTES - 1) for name in names]
            commands += [("STRLEN", name) for name in names]
            connection.send_packed_command(connection.pack_commands(commands))
            heads = [_reply(connection) for _ in names]
            lengths = [_reply(connection) for _ in names]
            for name, start, length in zip(names, heads, lengths, strict=True):
                head = decode_head(start[: read_prefix(start) or 0], 0) if start else None
                if (
                    head is not None
                    and head.num_head_bytes + head.num_data_bytes == length
                    and name == name_of(prefix, head.header.key)
                ):
                    yield head.header, head.num_data_bytes
        if cursor == b"0":
            return


def _reply(connection: Connection) -> Any:
    """Read a reply; None if the server refused, as where a name has no string but a list."""
    from redis import ResponseError

    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError:
        return None
