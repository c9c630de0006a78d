"""Copies cached blocks to a tier and back, in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from contextlib import ExitStack
from typing import NamedTuple

from sagellm.core import (
    BlockHeader,
    CachedRun,
    KVIdentity,
    KVTierProtocol,
    SequenceId,
    Ticket,
    TierOutcome,
    TierRequest,
    TokenIds,
)
from sagellm.core.kv_block import ROOT_HASH
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.kv_memory import KVMemory

_PART_BYTES, _PART_BLOCKS = 4 << 20, 32
"""KV copied between two steps, at least one block: about 1 ms."""

HEADERS_AT_ONCE = 128
"""Headers made or compared between two steps: about 1 ms."""

_LOADING = SequenceId("cache load")


class NamedRun(NamedTuple):
    """Consecutive blocks: the tokens from the prompt's first to their last, and their headers."""

    path: TokenIds
    headers: list[BlockHeader]


def named_runs(runs: Seq[CachedRun], chosen: Seq[int], identity: KVIdentity) -> Iterator[NamedRun | None]:
    """Yield the chosen cached runs with their headers, and None after each `HEADERS_AT_ONCE`.

    The parents of a chosen run must be chosen too.
    """
    hashes: dict[int | None, bytes] = {None: ROOT_HASH}
    for number in chosen:
        run = runs[number]
        size = len(run.token_ids) // len(run.block_ids)
        headers: list[BlockHeader] = []
        parent_hash = hashes[run.parent]
        for start in range(0, len(run.token_ids), size):
            tokens = run.token_ids[start : start + size]
            headers.append(BlockHeader.of(parent_hash, tokens, run.namespace, identity))
            parent_hash = headers[-1].hash
            if len(headers) % HEADERS_AT_ONCE == 0:
                yield None
        hashes[number] = parent_hash
        yield NamedRun(_path_of(runs, number), headers)


def joined_runs(headers: Seq[BlockHeader]) -> Iterator[NamedRun | None]:
    """Yield the runs that a tier's headers form, and None after each `HEADERS_AT_ONCE`; parents come first.

    O(tokens of all runs' paths).
    """
    parents: set[bytes] = set()
    before: BlockHeader | None = None
    for number, header in enumerate(headers):
        if before is not None and header.parent_hash != before.hash:
            parents.add(header.parent_hash)
        before = header
        if number % HEADERS_AT_ONCE == 0:
            yield None
    paths = {ROOT_HASH: TokenIds(b"")}
    run: list[BlockHeader] = []
    for number, header in enumerate(headers):
        if run and header.parent_hash != run[-1].hash:
            yield from _finished(run, paths, parents)
            run = []
        run.append(header)
        if number % HEADERS_AT_ONCE == 0:
            yield None
    yield from _finished(run, paths, parents)


class Copy(NamedTuple):
    """Blocks of a part that are being copied between buffers and a tier."""

    part: NamedRun
    headers: Seq[BlockHeader]  # of the blocks that are copied
    buffers: Seq[memoryview]
    ticket: Ticket

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(map(len, self.buffers))


class KVCopier:
    """Copies between an engine's prefix cache and a tier; every call takes about 1 ms."""

    def __init__(self, kv: KVCacheManager, memory: KVMemory) -> None:
        self._kv, self._memory = kv, memory
        self._block_size, self._block_bytes = memory.layout.block_size, memory.layout.block_bytes

    def parts(self, run: NamedRun) -> Iterator[NamedRun]:
        """Split a run into parts that can be copied between two steps."""
        num_blocks = min(_PART_BLOCKS, max(1, _PART_BYTES // self._block_bytes))
        first = self._first(run)
        for start in range(0, len(run.headers), num_blocks):
            headers = run.headers[start : start + num_blocks]
            yield NamedRun(run.path[: (first + start + len(headers)) * self._block_size], headers)

    def begin_save(self, tier: KVTierProtocol, part: NamedRun) -> Copy:
        """Start to store those blocks of a part that are still cached."""
        match = self._kv.cache.match_prefix(part.path, part.headers[0].namespace)
        block_ids = match.block_ids[self._first(part) :]
        buffers = self._buffers(len(block_ids))
        self._memory.backend.read_blocks(block_ids, buffers)
        headers = part.headers[: len(block_ids)]
        requests = [TierRequest("put", header, data) for header, data in zip(headers, buffers, strict=True)]
        return Copy(part, headers, buffers, tier.submit(requests))

    def begin_load(self, tier: KVTierProtocol, part: NamedRun) -> Copy:
        """Start to read those blocks of a part that are not cached yet."""
        headers = part.headers[self._num_known(part) :]
        buffers = self._buffers(len(headers))
        requests = [TierRequest("get", header, data) for header, data in zip(headers, buffers, strict=True)]
        return Copy(part, headers, buffers, tier.submit(requests))

    def end_load(self, copy: Copy, outcomes: Seq[TierOutcome]) -> int:
        """Cache the blocks that were read, and return how many of the part's blocks are cached then.

        Blocks are left out if their parents are not cached, no block is free, or one before them failed.
        """
        part, cache, namespace = copy.part, self._kv.cache, copy.part.headers[0].namespace
        num_good = next((n for n, each in enumerate(outcomes) if each != "done"), len(outcomes))
        num_cached = len(cache.match_prefix(part.path, namespace).block_ids)
        skipped = num_cached - self._first(part) - (len(part.headers) - len(copy.headers))
        if 0 <= skipped < num_good:  # else there is a gap, or requests have cached them meanwhile
            with ExitStack() as giving_back:
                block_ids = self._kv.take_free(num_good - skipped, _LOADING)
                giving_back.callback(self._kv.give_back, block_ids)
                if not block_ids:
                    return self._num_known(part)
                match = cache.lock(cache.match_prefix(part.path[: num_cached * self._block_size], namespace))
                giving_back.callback(cache.unlock, match)
                self._memory.backend.write_blocks(block_ids, copy.buffers[skipped : skipped + len(block_ids)])
                self._kv.adopt(part.path, match, block_ids, evicts=False)
        return self._num_known(part)

    def _num_known(self, part: NamedRun) -> int:
        """Return how many blocks of a part are cached, from its first one."""
        match = self._kv.cache.match_prefix(part.path, part.headers[0].namespace)
        return max(0, len(match.block_ids) - self._first(part))

    def _first(self, run: NamedRun) -> int:
        return len(run.path) // self._block_size - len(run.headers)

    def _buffers(self, num_blocks: int) -> list[memoryview]:
        return [memoryview(bytearray(self._block_bytes)) for _ in range(num_blocks)]


def _path_of(runs: Seq[CachedRun], number: int) -> TokenIds:
    parts = []
    at: int | None = number
    while at is not None:
        parts.append(runs[at].token_ids.data)
        at = runs[at].parent
    return TokenIds(b"".join(reversed(parts)))


def _finished(
    run: list[BlockHeader], paths: dict[bytes, TokenIds], parents: set[bytes]
) -> Iterator[NamedRun]:
    """Yield a run if its parent's path is known, and note the paths of other runs' parents."""
    path = paths.get(run[0].parent_hash) if run else None
    if path is None:
        return
    data = [path.data]
    for header in run:
        data.append(header.token_ids.data)
        if header.hash in parents:
            paths[header.hash] = TokenIds(b"".join(data))
    yield NamedRun(TokenIds(b"".join(data)), run)
