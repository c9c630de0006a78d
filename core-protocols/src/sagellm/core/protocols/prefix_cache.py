"""Which KV blocks already hold the beginning of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sagellm.core.ids import BlockId
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import CachedNode
from sagellm.core.tokens import TokenIdsLike


class PrefixMatch(NamedTuple):
    """The longest cached beginning of some token ids.

    `match_length` counts tokens and is a multiple of the block size; `block_ids` hold exactly
    those tokens. `node` and `version` are the cache's own.
    """

    match_length: int
    block_ids: list[BlockId]
    namespace: Namespace = DEFAULT
    node: CachedNode | None = None
    version: int = 0


class InsertResult(NamedTuple):
    """What an insertion did.

    `block_ids` now hold the prefix in the cache, one for each full block of the tokens.
    `num_new_blocks` of the offered blocks at the end of that list are the cache's from now on.
    `duplicate_block_ids` were offered for content that the cache already had: they stay with the
    caller.
    """

    block_ids: list[BlockId]
    num_new_blocks: int
    duplicate_block_ids: list[BlockId]


@dataclass(frozen=True, kw_only=True)
class KVBlockDescriptor:
    """One cached block: where it is and which tokens of the prompt it holds."""

    block_id: BlockId
    start: int  # position of its first token
    num_tokens: int
    namespace: Namespace = DEFAULT


@dataclass(frozen=True, kw_only=True)
class PrefixCacheMetrics:
    """Counts since the cache was made. Token hit rate = hit tokens ÷ looked-up tokens."""

    num_lookups: int
    num_hits: int  # lookups that matched at least one block
    num_lookup_tokens: int
    num_hit_tokens: int
    num_nodes: int
    num_blocks: int
    num_locked_blocks: int
    max_blocks: int
    num_inserted_blocks: int
    num_evicted_blocks: int

    @property
    def token_hit_rate(self) -> float:
        """Tokens whose KV was reused ÷ tokens of all lookups; 0 before the first."""
        return self.num_hit_tokens / self.num_lookup_tokens if self.num_lookup_tokens else 0.0


class PrefixCacheProtocol(ABC):
    """Finds and keeps the KV of prompt prefixes, by namespace.

    Providers are called as `factory(max_blocks, block_size, eviction_policy=..., clock=...)`.
    The order of calls for one request is: `match_prefix` (reads only, may be repeated), `lock`
    (what matched cannot be evicted; counts the lookup as used), later `insert_prefix` with what
    was computed, `unlock` with what `lock` returned. `evict` takes unlocked leaves in the order
    of the policy.

    The cache owns one reference of every block that it holds; it hands the reference back by
    returning the id from `evict` or `clear`, and never frees a block itself. Tokens are compared
    exactly, not by hash. Nothing is ever shared across namespaces. Calls may come from many
    threads; `match_prefix` costs O(nodes on the path).
    """

    @abstractmethod
    def match_prefix(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> PrefixMatch:
        """Find the longest cached prefix made of whole blocks. Changes nothing, counts nothing."""

    @abstractmethod
    def lock(self, match: PrefixMatch, *, num_lookup_tokens: int | None = None) -> PrefixMatch:
        """Protect what matched from eviction and count a lookup of `num_lookup_tokens` tokens.

        Returns the match to give to `unlock`. None as `num_lookup_tokens` counts no lookup and no
        hit of a node (a request that runs again after preemption, or keeps what it inserted). A
        match may be shortened by whole blocks before; one of length 0 protects nothing. Raises
        StaleMatchError if blocks entered or left the cache in between; match again then.
        """

    @abstractmethod
    def unlock(self, match: PrefixMatch) -> None:
        """Undo one `lock`. Raises BlockError if the match is not locked; length 0 is no lock."""

    @abstractmethod
    def insert_prefix(
        self,
        token_ids: TokenIdsLike,
        block_ids: Sequence[BlockId],
        namespace: Namespace = DEFAULT,
        *,
        priority: int = 0,
    ) -> InsertResult:
        """Remember which blocks hold the beginning of `token_ids`.

        `block_ids` may be fewer than the tokens fill; a last block that is not full is ignored.
        Offering the very block that the cache holds for these tokens is neither new nor a
        duplicate. It is a use of the whole prefix, but no hit.
        When the cache is at `max_blocks`, it keeps as much as fits: the rest is reported among
        neither the new nor the duplicate ones and stays with the caller. Raises BlockError when
        there are more blocks than tokens to fill them, one is given twice, or one is in the cache
        for other tokens.
        """

    @abstractmethod
    def query_by_prefix(
        self, token_ids: TokenIdsLike, min_match_length: int = 1, namespace: Namespace = DEFAULT
    ) -> list[KVBlockDescriptor] | None:
        """Return the cached blocks of a prefix, or None when fewer tokens match.

        Counts as a lookup, a hit or a miss.
        """

    @abstractmethod
    def evict(self, num_blocks: int) -> list[BlockId]:
        """Drop unlocked leaves until at least `num_blocks` are dropped or none is left.

        Returns the dropped blocks, whose references the caller now owns. A leaf that is longer
        than what is wanted gives up its end only.
        """

    @abstractmethod
    def clear(self) -> list[BlockId]:
        """Drop everything that no lock protects and return the blocks."""

    @property
    @abstractmethod
    def num_evictable_blocks(self) -> int:
        """Blocks that `evict` could drop now, in O(1)."""

    @abstractmethod
    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Return how many matched blocks are evictable now and would stop being so when locked.

        Raises StaleMatchError as `lock` does.
        """

    @abstractmethod
    def metrics(self) -> PrefixCacheMetrics:
        """Return the counts so far."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""


class NullPrefixCache(PrefixCacheProtocol):
    """Remembers nothing: prefix caching switched off."""

    def __init__(self, max_blocks: int = 0, block_size: int = 16, **_: object) -> None:
        del max_blocks, block_size
        self._num_lookups = 0
        self._num_lookup_tokens = 0

    def match_prefix(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> PrefixMatch:
        """Match nothing."""
        return PrefixMatch(0, [], namespace)

    def lock(self, match: PrefixMatch, *, num_lookup_tokens: int | None = None) -> PrefixMatch:
        """Count a lookup that missed."""
        if num_lookup_tokens is not None:
            self._num_lookups += 1
            self._num_lookup_tokens += num_lookup_tokens
        return match

    def unlock(self, match: PrefixMatch) -> None:
        """Nothing is locked."""

    def insert_prefix(
        self,
        token_ids: TokenIdsLike,
        block_ids: Sequence[BlockId],
        namespace: Namespace = DEFAULT,
        *,
        priority: int = 0,
    ) -> InsertResult:
        """Keep nothing: every block stays with the caller."""
        return InsertResult([], 0, [])

    def query_by_prefix(
        self, token_ids: TokenIdsLike, min_match_length: int = 1, namespace: Namespace = DEFAULT
    ) -> list[KVBlockDescriptor] | None:
        """Miss."""
        self._num_lookups += 1
        self._num_lookup_tokens += len(token_ids)
        return None

    def evict(self, num_blocks: int) -> list[BlockId]:
        """Have nothing to drop."""
        return []

    def clear(self) -> list[BlockId]:
        """Have nothing to drop."""
        return []

    @property
    def num_evictable_blocks(self) -> int:
        """Always 0."""
        return 0

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Always 0."""
        return 0

    def metrics(self) -> PrefixCacheMetrics:
        """Return the lookups, all of them misses."""
        return PrefixCacheMetrics(
            num_lookups=self._num_lookups,
            num_hits=0,
            num_lookup_tokens=self._num_lookup_tokens,
            num_hit_tokens=0,
            num_nodes=0,
            num_blocks=0,
            num_locked_blocks=0,
            max_blocks=0,
            num_inserted_blocks=0,
            num_evicted_blocks=0,
        )

    def check_integrity(self) -> None:
        """Nothing can be wrong."""
