"""Pools of several sizes and of one, asked for tokens, so that one load can run in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sagellm.core import BlockAllocationRequest, SequenceId
from sagellm.kvmgr.kv_pool import Extent, KVPoolConfig, MultiGranularKVPool, PagedKVPool

TOTAL_TOKENS = 1 << 20
PAGE = 16
LIMIT = 0.1
"""External fragmentation above which the compacted pool compacts."""


class Pool(Protocol):
    """What the load asks of a pool; a table is a list of pieces, each with its range of tokens."""

    def allocate(self, num_tokens: int) -> list[Any]:
        """Return pieces for so many tokens."""

    def free(self, pieces: list[Any]) -> object:
        """Take pieces back."""

    def range_of(self, piece: Any) -> tuple[int, int]:
        """Return the tokens [start, stop) of a piece."""

    def external_fragmentation(self) -> float:
        """Return what the pool's own metrics say."""

    def tidy(self, tables: list[list[Any]]) -> int:
        """Move what lies badly, fix the tables, and return how many tokens moved."""

    def check_integrity(self) -> None:
        """Raise AssertionError for books that are wrong."""


class Granular(MultiGranularKVPool):
    """The pool of three sizes."""

    def __init__(self) -> None:
        super().__init__(KVPoolConfig(total_tokens=TOTAL_TOKENS, page_tokens=PAGE))

    def range_of(self, piece: Extent) -> tuple[int, int]:
        """Return the tokens of a piece."""
        return piece.start, piece.start + self.config.size_of(piece.granularity)

    def external_fragmentation(self) -> float:
        """1 - largest free run ÷ free tokens."""
        return self.metrics().external_fragmentation

    def tidy(self, tables: list[list[Any]]) -> int:
        """Move nothing."""
        del tables
        return 0


class Compacted(Granular):
    """The pool of three sizes, compacted where there is need."""

    def tidy(self, tables: list[list[Any]]) -> int:
        """Compact if external fragmentation is above the limit, and enough is free to get below it."""
        least_free = self.config.sequence_tokens / LIMIT  # one piece may stay beside the largest run
        if self.external_fragmentation() <= LIMIT or self.get_free_tokens() < least_free:
            return 0
        moves = self.compact()
        places = {piece: (table, place) for table in tables for place, piece in enumerate(table)}
        for source, target in moves:
            table, place = places[target] = places.pop(source)
            table[place] = target
        return sum(self.config.size_of(source.granularity) for source, _ in moves)


class OneSize:
    """The pool of blocks, asked for tokens."""

    def __init__(self, block_size: int) -> None:
        self._pool = PagedKVPool(TOTAL_TOKENS // block_size, block_size)
        self._block_size = block_size
        self.free, self.check_integrity = self._pool.free, self._pool.check_integrity

    def allocate(self, num_tokens: int) -> list[Any]:
        """Round up to blocks."""
        num_blocks = -(-num_tokens // self._block_size)
        return list(
            self._pool.allocate(BlockAllocationRequest(num_blocks=num_blocks, sequence_id=SequenceId("a")))
        )

    def range_of(self, piece: int) -> tuple[int, int]:
        """Return the tokens of a block."""
        return piece * self._block_size, (piece + 1) * self._block_size

    def external_fragmentation(self) -> float:
        """1 - largest free run ÷ free blocks."""
        return self._pool.metrics().external_fragmentation

    def tidy(self, tables: list[list[Any]]) -> int:
        """Move nothing."""
        del tables
        return 0


POOLS: dict[str, Callable[[], Pool]] = {
    "1,024 + 16 + 1": Granular,
    "compacted": Compacted,
    "16": lambda: OneSize(16),
    "1,024": lambda: OneSize(1024),
    "4,096": lambda: OneSize(4096),
}
