"""Finds the blocks that a Redis or Valkey server has under a prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sagellm.core.kv_block import BlockHeader
from sagellm.kvmgr.kv_pool.tiers.record import PREFIX_BYTES, RecordFormat
from sagellm.kvmgr.kv_pool.tiers.resp import Command, Deadline, Reply, RespConnection, RespError

_BATCH = 64
"""Names requested per SCAN: about 1 ms of work."""

_MAX_BATCH, _MAX_NAME_BYTES = 64 * _BATCH, 1 << 16
"""Bounds of an answer: a server may return more names than requested, and others may have made them long."""

_PATTERN_BYTES = re.compile(rb"[*?\[\]^\\-]")
"""Characters with a meaning in a pattern unless escaped by a backslash."""


class Found(NamedTuple):
    """One batch of a scan."""

    blocks: list[tuple[BlockHeader, int]]  # header, bytes of data
    num_foreign: int
    num_corrupt: int


class StoreScan:
    """Iterates over all names with a prefix on one connection, in batches.

    Only sealed records under their own name count as blocks. An error of the connection ends the scan.
    """

    def __init__(self, connection: RespConnection, prefix: bytes, records: RecordFormat) -> None:
        self._connection, self._prefix, self._records = connection, prefix, records

    def run(self, make_deadline: Callable[[], Deadline]) -> Iterator[Found]:
        """Yield the blocks of each batch, each with its own deadline. Raises OSError."""
        pattern = _PATTERN_BYTES.sub(rb"\\\g<0>", self._prefix) + b"*"
        cursor: Reply = b"0"
        while isinstance(cursor, bytes | bytearray):
            deadline, connection = make_deadline(), self._connection
            connection.send([[b"SCAN", bytes(cursor), b"MATCH", pattern, b"COUNT", b"%d" % _BATCH]], deadline)
            connection.read_count(deadline, max_items=2)
            cursor = connection.read(deadline)
            count = connection.read_count(deadline, max_items=_MAX_BATCH)
            names = [connection.read(deadline, max_bytes=_MAX_NAME_BYTES) for _ in range(count)]
            yield self._look_at([bytes(name) for name in names if isinstance(name, bytearray)], deadline)
            if cursor == b"0":
                return
        raise RespError("a SCAN reply has no cursor")

    def _look_at(self, names: Sequence[bytes], deadline: Deadline) -> Found:
        starts = self._ask(
            [(b"GETRANGE", name, b"0", b"%d" % (PREFIX_BYTES - 1)) for name in names], deadline
        )
        prefixes = {
            name: prefix
            for name, start in zip(names, starts, strict=True)
            if (prefix := self._records.read_prefix(start, 0)) is not None
        }
        refusals = [self._records.refusal_of(start) for start in starts]
        num_foreign, num_corrupt = refusals.count("foreign"), refusals.count("corrupt") - len(prefixes)
        asked = [
            (b"GETRANGE", name, b"0", b"%d" % (prefix.num_head_bytes - 1))
            for name, prefix in prefixes.items()
        ]
        heads = self._ask(
            asked, deadline, max_bytes=max([p.num_head_bytes for p in prefixes.values()], default=0)
        )
        blocks = []
        for name, found in zip(prefixes, heads, strict=True):
            head = self._records.decode_head(found, 0)
            if head is not None and name == name_of(self._prefix, self._records, head.header):
                blocks.append((head.header, head.num_data_bytes))
            else:
                num_corrupt += 1
        return Found(blocks, num_foreign, num_corrupt)

    def _ask(
        self, commands: Sequence[Command], deadline: Deadline, *, max_bytes: int = PREFIX_BYTES
    ) -> list[bytes]:
        """Return the replies, b"" where the server refused, such as for a name that holds a list."""
        self._connection.send(commands, deadline)
        replies = [self._connection.read(deadline, max_bytes=max_bytes) for _ in commands]
        return [bytes(reply) if isinstance(reply, bytearray) else b"" for reply in replies]


def name_of(prefix: bytes, records: RecordFormat, header: BlockHeader) -> bytes:
    """Return the name under which a block is stored."""
    return prefix + records.name_of(header).hex().encode()
