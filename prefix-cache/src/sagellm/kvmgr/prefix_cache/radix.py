"""The prefix cache: checks what comes in, counts what is used, and guards one radix tree with a mutex."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock

from sagellm.core.errors import BlockError, ConfigError, InvalidInputError, StaleMatchError
from sagellm.core.ids import BlockId
from sagellm.core.logging import get_logger
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import EvictionPolicyProtocol
from sagellm.core.protocols.prefix_cache import (
    InsertResult,
    KVBlockDescriptor,
    PrefixCacheMetrics,
    PrefixCacheProtocol,
    PrefixMatch,
)
from sagellm.core.runtime import Clock, SystemClock
from sagellm.core.tokens import TokenIdsLike, pack
from sagellm.kvmgr.prefix_cache.leaf_order import LeafLRU
from sagellm.kvmgr.prefix_cache.node import TOKEN_BYTES, PrefixNode
from sagellm.kvmgr.prefix_cache.tree import RadixTree

_MIN_GHOSTS, _GHOSTS_A_BLOCK = 65_536, 16  # about 150 bytes each

_log = get_logger(__name__)


class RadixPrefixCache(PrefixCacheProtocol):
    """Token-exact prefix cache that evicts its own leaves, least recently used first.

    A lock or an insertion is a use of the whole path. `eviction_policy` replaces the order; one
    that names no victim ends eviction, and one that raises is itself replaced by this order. A leaf
    that no lock protects grows in place when its prefix is inserted with more blocks and the same
    priority.

    What was evicted is remembered without its blocks, `max_ghost_blocks` of them (if None, 16
    times `max_blocks`, at least 65,536; 150 bytes each): when it is inserted again, its counts go on.

    Raises ConfigError for sizes below one.
    """

    def __init__(
        self,
        max_blocks: int = 1000,
        block_size: int = 16,
        *,
        eviction_policy: EvictionPolicyProtocol | None = None,
        clock: Clock | None = None,
        max_ghost_blocks: int | None = None,
    ) -> None:
        for name, value in (("max_blocks", max_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"prefix cache: {name} is {value}; it must be at least 1")
        self.max_blocks = max_blocks
        self.block_size = block_size
        self._clock = SystemClock() if clock is None else clock
        num_ghosts = max_ghost_blocks
        if num_ghosts is None:
            num_ghosts = max(_MIN_GHOSTS, _GHOSTS_A_BLOCK * max_blocks)
        order = LeafLRU() if eviction_policy is None else eviction_policy
        self._tree = RadixTree(block_size, order, num_ghosts)
        self._mutex = Lock()  # held during every call that reads or changes what follows, and the tree
        self._num_lookups = self._num_hits = self._num_lookup_tokens = self._num_hit_tokens = 0
        self._num_inserted = self._num_evicted = 0

    def match_prefix(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> PrefixMatch:
        """Find the longest cached prefix made of whole blocks. Changes nothing, counts nothing."""
        data = pack(token_ids).data
        with self._mutex:
            return self._tree.match(data, namespace)

    def lock(self, match: PrefixMatch, *, num_lookup_tokens: int | None = None) -> PrefixMatch:
        """Protect what matched from eviction and count a lookup of `num_lookup_tokens` tokens.

        A match of length 0 protects nothing. Raises StaleMatchError if blocks entered or left
        the cache since the match, or if the match is another cache's.
        """
        with self._mutex:
            node = self._find(match)
            if node is not None:
                is_hit = num_lookup_tokens is not None
                node = self._tree.lock(node, match.match_length, self._clock.now_ns(), is_hit=is_hit)
            if num_lookup_tokens is not None:
                self._count(num_lookup_tokens, match.match_length)
            return PrefixMatch(match.match_length, match.block_ids, match.namespace, node, self._tree.version)

    def unlock(self, match: PrefixMatch) -> None:
        """Undo one `lock`; a match of length 0 was never locked.

        Raises BlockError if no lock ends where this match does.
        """
        if not match.match_length:
            return
        node = match.node
        with self._mutex:
            if not isinstance(node, PrefixNode) or not node.num_own_locks or not self._tree.owns(node):
                raise BlockError(
                    f"a match of {match.match_length} tokens is not locked; unlock once what lock returned"
                )
            self._tree.unlock(node)

    def insert_prefix(
        self,
        token_ids: TokenIdsLike,
        block_ids: Sequence[BlockId],
        namespace: Namespace = DEFAULT,
        *,
        priority: int = 0,
    ) -> InsertResult:
        """Remember which blocks hold the beginning of `token_ids`.

        Evicts nothing: at `max_blocks` it keeps the first ones that fit. Raises BlockError, and
        changes nothing, when there are more blocks than tokens to fill them, one is given twice,
        or one is in the cache for other tokens.
        """
        tokens = pack(token_ids)
        if len(block_ids) > -(-len(tokens) // self.block_size):
            raise BlockError(
                f"{len(block_ids)} blocks of {self.block_size} tokens for a prefix of {len(tokens)} tokens"
            )
        if len(set(block_ids)) < len(block_ids):
            repeated = [block_id for block_id, times in Counter(block_ids).items() if times > 1]
            raise BlockError(f"blocks {repeated} are given more than once for one prefix")
        offered = list(block_ids[: len(tokens) // self.block_size])
        data = tokens.data[: len(offered) * self.block_size * TOKEN_BYTES]
        with self._mutex:
            held, new = self._insert(data, offered, namespace, priority)
        duplicates = [block_id for block_id, kept in zip(offered, held, strict=False) if block_id != kept]
        return InsertResult(held + new, len(new), duplicates)

    def query_by_prefix(
        self, token_ids: TokenIdsLike, min_match_length: int = 1, namespace: Namespace = DEFAULT
    ) -> list[KVBlockDescriptor] | None:
        """Return the cached blocks of a prefix, or None when fewer tokens match. Counts a lookup."""
        tokens = pack(token_ids)
        with self._mutex:
            match = self._tree.match(tokens.data, namespace)
            is_hit = match.match_length >= max(min_match_length, 1)
            self._count(len(tokens), match.match_length if is_hit else 0)
        if not is_hit:
            return None
        size = self.block_size
        return [
            KVBlockDescriptor(block_id=block_id, start=index * size, num_tokens=size, namespace=namespace)
            for index, block_id in enumerate(match.block_ids)
        ]

    def evict(self, num_blocks: int) -> list[BlockId]:
        """Drop `num_blocks` blocks of unlocked leaves, fewer if no victim is left, and return them.

        Raises PluginError when the policy names a node that is no unlocked leaf of this cache.
        """
        with self._mutex:
            dropped = self._tree.evict(num_blocks, self._clock.now_ns())
            self._num_evicted += len(dropped)
        return dropped

    def clear(self) -> list[BlockId]:
        """Drop everything that no lock protects and return the blocks, whatever the policy says."""
        with self._mutex:
            dropped = self._tree.clear()
            self._num_evicted += len(dropped)
            num_left = len(self._tree.cached)
        _log.info("prefix cache cleared: %d blocks dropped, %d locked", len(dropped), num_left)
        return dropped

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks of unlocked nodes. Whatever is below one is unlocked too."""
        return self._tree.num_evictable

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Return how many matched blocks are evictable now and would stop being so when locked.

        Raises StaleMatchError as `lock` does.
        """
        with self._mutex:
            node = self._find(match)
            if node is None or node.lock_count:
                return 0
            num_idle = sum(step.num_blocks for step in node.path() if not step.lock_count)
            return num_idle - (node.depth - match.match_length) // self.block_size

    def metrics(self) -> PrefixCacheMetrics:
        """Return the counts so far; what `clear` dropped counts as evicted."""
        with self._mutex:
            num_blocks = len(self._tree.cached)
            return PrefixCacheMetrics(
                num_lookups=self._num_lookups,
                num_hits=self._num_hits,
                num_lookup_tokens=self._num_lookup_tokens,
                num_hit_tokens=self._num_hit_tokens,
                num_nodes=self._tree.num_nodes,
                num_blocks=num_blocks,
                num_locked_blocks=num_blocks - self._tree.num_evictable,
                max_blocks=self.max_blocks,
                num_inserted_blocks=self._num_inserted,
                num_evicted_blocks=self._num_evicted,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself. O(cache)."""
        with self._mutex:
            self._tree.check_integrity()
            num_blocks = len(self._tree.cached)
            assert num_blocks <= self.max_blocks, f"{num_blocks} blocks, {self.max_blocks} allowed"
            assert self._num_inserted - self._num_evicted == num_blocks, "blocks came or went uncounted"

    def _insert(
        self, data: bytes, offered: list[BlockId], namespace: Namespace, priority: int
    ) -> tuple[list[BlockId], list[BlockId]]:
        """Return the blocks that were cached already and those that are from now on."""
        tree = self._tree
        match = tree.match(data, namespace)
        num_held = len(match.block_ids)
        new = offered[num_held : num_held + self.max_blocks - len(tree.cached)]
        if not tree.cached.isdisjoint(new):
            raise BlockError(f"blocks {sorted(tree.cached.intersection(new))} are cached for other tokens")
        now_ns = self._clock.now_ns()
        if isinstance(match.node, PrefixNode):
            tree.touch(match.node, now_ns)
        if new:
            begin = match.match_length * TOKEN_BYTES
            tail = data[begin : begin + len(new) * tree.block_bytes]
            tree.extend(match, tail, new, priority=priority, now_ns=now_ns)
            self._num_inserted += len(new)
        return match.block_ids, new

    def _find(self, match: PrefixMatch) -> PrefixNode | None:
        """Return the node in which a match ends now; None for an empty match."""
        if match.version != self._tree.version:
            raise StaleMatchError("blocks entered or left the cache since this match; match again")
        if not match.match_length:
            return None
        node = match.node
        if not isinstance(node, PrefixNode) or not self._tree.owns(node):
            raise StaleMatchError("this match is another cache's; match again in this one")
        if match.match_length % self.block_size or match.match_length > node.depth:
            raise InvalidInputError(
                f"a match of {match.match_length} tokens; shorten one by whole blocks of {self.block_size}"
            )
        while match.match_length <= node.start and node.parent is not None:
            node = node.parent  # the caller shortened the match, or the node was split since
        return node

    def _count(self, num_tokens: int, num_hit_tokens: int) -> None:
        self._num_lookups += 1
        self._num_lookup_tokens += num_tokens
        self._num_hits += num_hit_tokens > 0
        self._num_hit_tokens += num_hit_tokens
