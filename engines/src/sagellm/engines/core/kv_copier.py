"""Copies cached blocks to a tier and back, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

from sagellm.core import (
    BlockHeader,
    CachedRun,
    EngineError,
    KVIdentity,
    KVTierProtocol,
    SequenceId,
    TierAction,
    TierOutcome,
    TierRequest,
    TokenIds,
    run_to_end,
)
from sagellm.core.kv_block import ROOT_HASH
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.kv_memory import KVMemory

_PART_BYTES = 32 << 20
"""Of KV that is copied at once; a block at least."""

_LOADING = SequenceId("cache load")


class NamedRun(NamedTuple):
    """Blocks one behind the other: all tokens from the prompt's first to their last, and their headers."""

    path: TokenIds
    headers: list[BlockHeader]


def named_runs(runs: Seq[CachedRun], chosen: Seq[int], identity: KVIdentity) -> Iterator[NamedRun]:
    """Yield chosen cached runs by name; what comes before one of them must be chosen, too."""
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
        hashes[number] = parent_hash
        yield NamedRun(_path_of(runs, number), headers)


def joined_runs(headers: Seq[BlockHeader]) -> Iterator[NamedRun]:
    """Yield what a tier has stored as runs; what comes before one must be stored before it."""
    parents = {each.parent_hash for before, each in pairwise(headers) if each.parent_hash != before.hash}
    paths = {ROOT_HASH: TokenIds(b"")}
    run: list[BlockHeader] = []
    for header in headers:
        if run and header.parent_hash != run[-1].hash:
            yield from _finished(run, paths, parents)
            run = []
        run.append(header)
    yield from _finished(run, paths, parents)


class KVCopier:
    """Between the prefix cache of an engine and a tier that answers at once."""

    def __init__(self, kv: KVCacheManager, memory: KVMemory) -> None:
        self._kv, self._memory = kv, memory
        self._block_size, self._block_bytes = memory.layout.block_size, memory.layout.block_bytes

    def parts(self, run: NamedRun) -> Iterator[NamedRun]:
        """Cut a run into what may be copied between two steps."""
        num_blocks = max(1, _PART_BYTES // self._block_bytes)
        first = self._first(run)
        for start in range(0, len(run.headers), num_blocks):
            headers = run.headers[start : start + num_blocks]
            yield NamedRun(run.path[: (first + start + len(headers)) * self._block_size], headers)

    def save(self, tier: KVTierProtocol, part: NamedRun) -> int:
        """Store blocks, and return how many were still cached. Raises EngineError if the tier takes fewer."""
        match = self._kv.cache.match_prefix(part.path, part.headers[0].namespace)
        block_ids = match.block_ids[self._first(part) :]
        buffers = self._buffers(len(block_ids))
        self._memory.backend.read_blocks(block_ids, buffers)
        outcomes = self._ask(tier, "put", part.headers[: len(block_ids)], buffers)
        if any(outcome != "done" for outcome in outcomes):
            raise EngineError("blocks could not be written: the device is full, or fails")
        return len(block_ids)

    def load(self, tier: KVTierProtocol, part: NamedRun) -> tuple[int, list[TierOutcome]]:
        """Cache blocks that are not cached yet; return how many are cached then, and what the tier said.

        Fewer than asked for where the blocks before them are not cached, where no block is free, and behind
        one that the tier has not got whole.
        """
        cache, namespace, first = self._kv.cache, part.headers[0].namespace, self._first(part)
        num_cached = len(cache.match_prefix(part.path, namespace).block_ids)
        wanted = part.headers[num_cached - first :] if num_cached >= first else []
        outcomes: list[TierOutcome] = []
        with ExitStack() as giving_back:
            block_ids = self._kv.take_free(len(wanted), _LOADING)
            giving_back.callback(self._kv.give_back, block_ids)
            if block_ids:
                known = part.path[: num_cached * self._block_size]
                match = cache.lock(cache.match_prefix(known, namespace))
                giving_back.callback(cache.unlock, match)
                buffers = self._buffers(len(block_ids))
                outcomes = self._ask(tier, "get", wanted[: len(block_ids)], buffers)
                num_good = next((n for n, each in enumerate(outcomes) if each != "done"), len(outcomes))
                self._memory.backend.write_blocks(block_ids[:num_good], buffers[:num_good])
                self._kv.adopt(part.path, match, block_ids[:num_good], evicts=False)
        num_cached = len(cache.match_prefix(part.path, namespace).block_ids)
        return max(0, num_cached - first), outcomes

    def _first(self, run: NamedRun) -> int:
        return len(run.path) // self._block_size - len(run.headers)

    def _buffers(self, num_blocks: int) -> list[memoryview]:
        return [memoryview(bytearray(self._block_bytes)) for _ in range(num_blocks)]

    @staticmethod
    def _ask(
        tier: KVTierProtocol, action: TierAction, headers: Seq[BlockHeader], buffers: Seq[memoryview]
    ) -> list[TierOutcome]:
        pairs = zip(headers, buffers, strict=True)
        return list(run_to_end(tier, [TierRequest(action, header, data) for header, data in pairs]))


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
    """Yield a run if what comes before it is known, and note where others go on."""
    path = paths.get(run[0].parent_hash) if run else None
    if path is None:
        return
    data = [path.data]
    for header in run:
        data.append(header.token_ids.data)
        if header.hash in parents:
            paths[header.hash] = TokenIds(b"".join(data))
    yield NamedRun(TokenIds(b"".join(data)), run)
