"""A prefix cache under eight threads at once, checked against a dict from blocks to their contents."""

from __future__ import annotations

import time
from random import Random

from sagellm.core.errors import StaleMatchError
from sagellm.core.ids import BlockId
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import CachedNode
from sagellm.core.protocols.prefix_cache import PrefixCacheProtocol, PrefixMatch
from sagellm.core.runtime import Randomness, SystemClock
from sagellm.core.tokens import TokenIds, pack
from sagellm.testing.eviction_audit import AuditingEvictionPolicy
from sagellm.testing.threads import NUM_THREADS, run_in_threads

_NAMESPACES = (DEFAULT, Namespace("other"), Namespace.public("docs"))
_BLOCK_SIZE = 2
_MAX_BLOCKS_A_CALL = 8
_CALLS_A_ROUND = 5


class YieldingClock(SystemClock):
    """Lets another thread run whenever code reads the time."""

    def now_ns(self) -> int:
        """Return the time, a moment later."""
        time.sleep(0)
        return super().now_ns()


class YieldingPolicy(AuditingEvictionPolicy):
    """Lets another thread run in the middle of an eviction."""

    def victim(self) -> CachedNode | None:
        """Name a victim, a moment later."""
        node = super().victim()
        time.sleep(0)
        return node


class ThreadedCache:
    """Runs random operations in eight threads; no block id is ever used for two contents.

    Each thread checks that the blocks of a match hold its tokens, and that a locked block is not
    given up. At the end: each block that the cache took came back once.
    """

    def __init__(self, cache: PrefixCacheProtocol) -> None:
        self._cache = cache
        self._holds: dict[BlockId, tuple[Namespace, bytes]] = {}
        self._taken: list[BlockId] = []
        self._returned: set[BlockId] = set()
        self._given_back: list[BlockId] = []

    def run(self, num_operations: int, seed: int = 0) -> None:
        """Run this many operations, an eighth in each thread. Raises AssertionError."""
        per_thread = num_operations // (NUM_THREADS * _CALLS_A_ROUND)

        def work(thread: int) -> None:
            random = Randomness(seed * NUM_THREADS + thread).stream("threads")
            for index in range(per_thread):
                self._operate(random, BlockId((thread * per_thread + index) * _MAX_BLOCKS_A_CALL))

        run_in_threads(work, num_threads=NUM_THREADS)
        self._cache.check_integrity()
        self._give_back(self._cache.clear())
        assert self._returned == set(self._taken), "a block is lost, or was never the cache's"
        assert len(self._given_back) == len(self._taken), "a block was given back twice"

    def _operate(self, random: Random, first: BlockId) -> None:
        """Match, lock, insert, unlock, evict."""
        namespace = random.choice(_NAMESPACES)
        tokens = pack(random.choices((0, 1), k=random.randrange(2 * _MAX_BLOCKS_A_CALL + 1)))
        match = lock_match(self._cache, tokens, namespace)
        self._check(match, tokens, namespace)
        offered = [BlockId(first + index) for index in range(-(-len(tokens) // _BLOCK_SIZE))]
        for index, block_id in enumerate(offered, 1):
            self._holds[block_id] = (namespace, tokens[: index * _BLOCK_SIZE].data)
        result = self._cache.insert_prefix(tokens, offered, namespace)
        new = result.block_ids[len(result.block_ids) - result.num_new_blocks :]
        self._taken += new if result.partial_block_id is None else [*new, result.partial_block_id]
        self._give_back(list(result.released_block_ids))
        assert result.block_ids[: len(match.block_ids)] == match.block_ids, "a locked block was replaced"
        assert self._returned.isdisjoint(match.block_ids), "a locked block was given up"
        self._cache.unlock(match)
        self._give_back(self._cache.evict(random.randrange(6)))

    def _check(self, match: PrefixMatch, tokens: TokenIds, namespace: Namespace) -> None:
        for index, block_id in enumerate(match.block_ids, 1):
            expected = (namespace, tokens[: index * _BLOCK_SIZE].data)
            assert self._holds[block_id] == expected, f"block {block_id} does not hold these tokens"
        if match.partial is not None:
            owner, held = self._holds[match.partial.block_id]
            agreed = tokens[: match.match_length].data
            assert owner == namespace, f"block {match.partial.block_id} is another namespace's"
            assert held.startswith(agreed), f"block {match.partial.block_id} does not begin with these tokens"

    def _give_back(self, block_ids: list[BlockId]) -> None:
        self._given_back.extend(block_ids)
        self._returned.update(block_ids)


def lock_match(cache: PrefixCacheProtocol, token_ids: object, namespace: Namespace = DEFAULT) -> PrefixMatch:
    """Match and lock, retrying as long as other threads change the cache in between."""
    tokens = pack(token_ids)  # type: ignore[arg-type]
    while True:
        try:
            return cache.lock(cache.match_prefix(tokens, namespace))
        except StaleMatchError:
            continue
