"""What a Redis or Valkey server has under a prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.kvmgr.kv_pool.tiers.record import PREFIX_BYTES, decode_head, read_prefix

if TYPE_CHECKING:
    from redis import Connection

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
            starts = _ask(connection, [("GETRANGE", name, 0, PREFIX_BYTES - 1) for name in names])
            sizes = {name: read_prefix(start or b"") for name, start in zip(names, starts, strict=True)}
            names = [name for name, size in sizes.items() if size is not None]
            heads = _ask(connection, [("GETRANGE", name, 0, (sizes[name] or 1) - 1) for name in names])
            lengths = _ask(connection, [("STRLEN", name) for name in names])
            for name, found, length in zip(names, heads, lengths, strict=True):
                head = decode_head(found or b"", 0)
                if (
                    head is not None
                    and head.num_head_bytes + head.num_data_bytes == length
                    and name == name_of(prefix, head.header.key)
                ):
                    yield head.header, head.num_data_bytes
        if cursor == b"0":
            return


def _ask(connection: Connection, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the replies; None where the server refused, as where a name has no string but a list."""
    from redis import ResponseError

    if commands:
        connection.send_packed_command(connection.pack_commands(commands))
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(connection.read_response(disable_decoding=True))
        except ResponseError:
            replies.append(None)
    return replies
