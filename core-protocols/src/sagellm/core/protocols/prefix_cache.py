"""Which KV blocks already hold the beginning of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from sagellm.core.errors import EngineError
from sagellm.core.ids import BlockId
from sagellm.core.kv_block import BlockHeader
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import CachedNode, EvictionPolicyProtocol
from sagellm.core.protocols.kv_events import KVEventSink, RemovalReason
from sagellm.core.tokens import TokenIds, TokenIdsLike

_NUM_SHOWN = 8


def _few(ids: Sequence[int]) -> str:
    """Format the first of possibly thousands of ids."""
    return f"[{', '.join(map(str, ids[:_NUM_SHOWN]))}{', …' if len(ids) > _NUM_SHOWN else ''}]"


class PartialMatch(NamedTuple):
    """The beginning of a cached block that agrees with the tokens; what follows in it does not.

    To use it, copy the block and continue writing after `num_tokens`, before any other block is
    written: no lock protects it.
    """

    block_id: BlockId
    num_tokens: int


class PrefixAnswers(NamedTuple):
    """How long the answers were to earlier prompts that begin with the same tokens.

    The longest of the prefixes that are known comes first; what holds of it holds of the prompt best.
    """

    num_tokens: int  # of the prompt, that these prompts have in common
    num_answers: int
    lengths: tuple[int, ...]  # generated tokens of the latest few, the latest last
    last_ns: int  # when the latest of them ended, on the cache's clock


class EvictedBlocks(NamedTuple):
    """A run of full blocks about to be evicted, in the order of its tokens; its KV is still intact."""

    block_ids: list[BlockId]
    headers: list[BlockHeader]

    def __repr__(self) -> str:
        return f"EvictedBlocks({len(self.block_ids)} blocks {_few(self.block_ids)})"


class CachedRun(NamedTuple):
    """A run of consecutive full blocks: their tokens, and the index of the run that they follow."""

    token_ids: TokenIds
    block_ids: list[BlockId]
    namespace: Namespace
    parent: int | None  # index in the list of runs; None at the beginning of a prompt
    last_use_ns: int = 0  # on the clock of the cache

    def __repr__(self) -> str:
        blocks = f"{len(self.block_ids)} blocks {_few(self.block_ids)}"
        return f"CachedRun({self.token_ids!r}, {blocks}, {self.namespace!r}, parent={self.parent})"


class PrefixMatch(NamedTuple):
    """The longest cached beginning of some token ids.

    `match_length` counts tokens: those of `block_ids`, which are whole blocks, and those of
    `partial`. `node` and `version` are the cache's own.
    """

    match_length: int
    block_ids: list[BlockId]
    namespace: Namespace = DEFAULT
    node: CachedNode | None = None
    version: int = 0
    partial: PartialMatch | None = None

    def __repr__(self) -> str:
        blocks = f"{len(self.block_ids)} blocks {_few(self.block_ids)}"
        partial = f", partial={self.partial!r}" if self.partial else ""
        return f"PrefixMatch({self.match_length} tokens, {blocks}{partial}, {self.namespace!r})"


class InsertResult(NamedTuple):
    """What an insertion did.

    `block_ids` now hold the prefix in the cache, one for each full block of the tokens.
    The last `num_new_blocks` of the offered blocks in that list now belong to the cache.
    `duplicate_block_ids` were offered for content already in the cache: they stay with the
    caller. `partial_block_id` is the last block offered, not full, if the cache keeps it too.
    `released_block_ids` are returned by the cache: partial blocks that new blocks replace.
    """

    block_ids: list[BlockId]
    num_new_blocks: int
    duplicate_block_ids: list[BlockId]
    partial_block_id: BlockId | None = None
    released_block_ids: tuple[BlockId, ...] = ()

    def __repr__(self) -> str:
        lists = ("block_ids", "duplicate_block_ids", "released_block_ids")
        shown = [f"{name}={_few(getattr(self, name))}" for name in lists if getattr(self, name)]
        partial = [] if self.partial_block_id is None else [f"partial_block_id={self.partial_block_id}"]
        counts = f"{len(self.block_ids)} blocks, {self.num_new_blocks} new"
        return f"InsertResult({', '.join([counts, *shown, *partial])})"


@dataclass(frozen=True, kw_only=True)
class KVBlockDescriptor:
    """One cached block: where it is and which tokens of the prompt it holds."""

    block_id: BlockId
    start: int  # position of its first token
    num_tokens: int  # fewer than a full block if only its beginning agrees
    namespace: Namespace = DEFAULT


@dataclass(frozen=True, kw_only=True)
class PinResult:
    """How much of a prefix is pinned now, and why not all of it."""

    num_tokens: int  # asked for
    num_pinned_tokens: int
    num_pinned_blocks: int  # of all pins in total
    max_pinned_blocks: int
    reason: str = ""  # empty if all whole blocks are pinned


@dataclass(frozen=True, kw_only=True)
class PinnedPrefix:
    """One pin: what it keeps, and its remaining time without a lookup that hits it."""

    token_ids: TokenIds
    namespace: Namespace
    ttl_s: float | None = None  # None for no end
    left_s: float | None = None


MissCause: TypeAlias = Literal[
    "none", "never_seen", "evicted", "other_tenant", "block_border", "disabled", "unknown"
]


@dataclass(frozen=True, kw_only=True)
class MissExplanation:
    """Why a prompt did not match further.

    `cause` is `none` if all of it is cached; `never_seen` if its next block was never cached; `evicted` if
    it was dropped, with why, by whom, when and for whom; `other_tenant` if it is cached in a namespace
    that this one does not share; `block_border` if what follows agrees with cached tokens, but for less
    than a block, and parts of blocks are not reused or what is left fills none; `unknown` if it may
    have been dropped longer ago than the cache remembers, or other namespaces are too large to search.
    """

    cause: MissCause
    num_tokens: int
    match_length: int  # tokens reused
    diverges_at: int  # position of the first token that no cached block of the namespace has
    reason: RemovalReason | None = None  # why the block was dropped
    policy: str | None = None  # class of the policy that chose it; None if none was asked
    evicted_ns: int | None = None  # on the cache's clock
    evicted_for: str | None = None  # account whose blocks took the room, if known
    num_evicted_blocks: int = 0  # consecutive blocks of this prompt that were once cached


@dataclass(kw_only=True)
class TenantUsage:
    """One tenant's, or one public namespace's, blocks in the cache and hits."""

    num_blocks: int = 0  # full ones
    max_blocks: int | None = None  # its quota
    num_lookups: int = 0
    num_hits: int = 0  # lookups that matched at least one token
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_partial_blocks: int = 0  # besides the full ones; they do not count towards the quota

    @property
    def has_blocks(self) -> bool:
        """Whether it has any cached block."""
        return self.num_blocks > 0 or self.num_partial_blocks > 0


@dataclass(frozen=True, kw_only=True)
class PrefixCacheMetrics:
    """Counts since the cache was made. Token hit rate = hit tokens ÷ looked-up tokens."""

    num_lookups: int = 0
    num_hits: int = 0  # lookups that matched at least one token
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_nodes: int = 0
    num_blocks: int = 0  # full and partial ones; the sum over all tenants
    num_locked_blocks: int = 0
    max_blocks: int = 0
    num_inserted_blocks: int = 0
    num_evicted_blocks: int = 0  # all that left, including replaced partial ones
    num_partial_blocks: int = 0  # of the blocks, those that are not full
    num_inserted_partial_blocks: int = 0
    num_partial_hit_tokens: int = 0  # of the hit tokens, those in a block that matched in part
    num_pins: int = 0
    num_pinned_blocks: int = 0
    max_pinned_blocks: int = 0
    num_ghost_blocks: int = 0  # evicted ones that are remembered
    tenants: dict[str, TenantUsage] = field(default_factory=dict)
    policy_failure: str = ""  # why LRU replaced the eviction policy, if it did

    @property
    def token_hit_rate(self) -> float:
        """Tokens whose KV was reused ÷ tokens of all lookups; 0 before the first."""
        return self.num_hit_tokens / self.num_lookup_tokens if self.num_lookup_tokens else 0.0


class PrefixCacheProtocol(ABC):
    """Finds and keeps the KV of prompt prefixes, by namespace.

    Providers are called as `factory(max_blocks, block_size, eviction_policy=..., clock=..., identity=...)`;
    `identity` is what the hashes of blocks depend on besides tokens and namespace.
    The order of calls for one request is: `match_prefix` (reads only, may be repeated), `lock`
    (protects the match from eviction; counts the lookup as used), later `insert_prefix` with what
    was computed, `unlock` with what `lock` returned. `evict` takes unlocked leaves in the
    policy's order.

    The cache owns one reference to every block that it holds; it gives the reference up by
    returning the id from `evict` or `clear`, and never frees a block itself. Tokens are compared
    exactly, not by hash. Nothing is ever shared across namespaces. Calls may come from many
    threads; `match_prefix` costs O(nodes on the path).
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def match_prefix(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> PrefixMatch:
        """Find the longest cached prefix: whole blocks, and perhaps the beginning of one more.

        Changes nothing, counts nothing.
        """

    @abstractmethod
    def lock(self, match: PrefixMatch, *, num_lookup_tokens: int | None = None) -> PrefixMatch:
        """Protect the match from eviction and count a lookup of `num_lookup_tokens` tokens.

        Returns the match to pass to `unlock`. If `num_lookup_tokens` is None, neither a lookup nor a node's
        hit is counted (a request that runs again after preemption, or keeps what it inserted). A
        match may first be shortened to any number of its whole blocks; only those are protected.
        Raises StaleMatchError if blocks have entered or left the cache since; then match again.
        """

    @abstractmethod
    def unlock(self, match: PrefixMatch) -> None:
        """Undo one `lock`. Raises BlockError if there is none; a match without a whole block has none."""

    @abstractmethod
    def insert_prefix(
        self,
        token_ids: TokenIdsLike,
        block_ids: Sequence[int],
        namespace: Namespace = DEFAULT,
        *,
        priority: int = 0,
    ) -> InsertResult:
        """Record which blocks hold the beginning of `token_ids`.

        `block_ids` may be fewer than the tokens fill. A partial block at the end may be kept as
        well, so offer it only when nothing writes to it any more; it is evicted before any full block.
        Offering the very block that the cache holds for these tokens is neither new nor a
        duplicate. It is a use of the whole prefix, but not a hit.
        When the cache is at `max_blocks`, or the tenant at its quota, it keeps as much as fits: the rest
        is reported as neither new nor duplicate and stays with the caller. Raises
        BlockError when there are more blocks than tokens to fill them, one is given twice, or one is
        cached for other tokens.
        """

    @abstractmethod
    def query_by_prefix(
        self, token_ids: TokenIdsLike, min_match_length: int = 1, namespace: Namespace = DEFAULT
    ) -> list[KVBlockDescriptor] | None:
        """Return the cached blocks of a prefix, or None when fewer tokens match.

        Counts as a lookup, a hit or a miss.
        """

    @abstractmethod
    def evict(self, num_blocks: int, *, namespace: Namespace | None = None) -> list[BlockId]:
        """Drop unlocked leaves until at least `num_blocks` are dropped or none is left.

        Returns the dropped blocks, whose references the caller now owns. A leaf longer
        than what is wanted gives up only its end. `namespace` is the beneficiary: if this many more blocks
        would exceed its tenant's quota, the tenant's own leaves go first.
        """

    def make_room(self, num_blocks: int, namespace: Namespace) -> list[BlockId]:
        """Drop what prevents inserting `num_blocks` in a namespace, and nothing else.

        A tenant at its quota loses only its own leaves. Returns the dropped blocks as `evict` does.
        """
        return self.evict(num_blocks, namespace=namespace)

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

    def pin(
        self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT, *, ttl_s: float | None = None
    ) -> PinResult:
        """Keep the cached whole blocks of a prefix until `unpin`, or until no lookup hit them for `ttl_s`.

        Pins less if less is cached or the budget of pinned blocks runs out. Raises InvalidInputError for a
        `ttl_s` that is not positive. A cache without pins pins nothing and says so.
        """
        del namespace, ttl_s
        return PinResult(
            num_tokens=len(token_ids),
            num_pinned_tokens=0,
            num_pinned_blocks=0,
            max_pinned_blocks=0,
            reason="this prefix cache has no pins",
        )

    def unpin(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> int:
        """End the pins that end within a prefix and return their number."""
        del token_ids, namespace
        return 0

    def pins(self) -> list[PinnedPrefix]:
        """Return the current pins; passing one's fields to `unpin` ends it. None by default."""
        return []

    def runs(self) -> list[CachedRun]:
        """Return all cached full blocks, parents first. O(cache). Empty by default."""
        return []

    def explain_miss(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> MissExplanation:
        """Say why no more of these tokens would match now. Counts nothing. `unknown` by default."""
        match_length = self.match_prefix(token_ids, namespace).match_length
        return MissExplanation(
            cause="unknown" if match_length < len(token_ids) else "none",
            num_tokens=len(token_ids),
            match_length=match_length,
            diverges_at=match_length,
        )

    def note_miss(self, token_ids: TokenIdsLike, match: PrefixMatch) -> Callable[[], MissExplanation]:
        """Return a function that explains later what `explain_miss` would explain now.

        `match` is the match just found for the tokens, locked or not. Called at every admission, so it
        should cost next to nothing: the explanation is computed when requested, which is seldom. The
        default computes it at once.
        """
        explanation = self.explain_miss(token_ids, match.namespace)
        return lambda: explanation

    def move_blocks(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Replace the first block of each pair, if cached, by the second; its KV has been copied.

        All or nothing. Locks remain, but unlocked matches become stale; the caller updates the
        ids in the matches it keeps. Raises BlockError if a second block is cached or given twice. By
        default raises EngineError: blocks in this cache cannot be moved. May cost O(cache).
        """
        raise EngineError(f"{type(self).__name__} cannot move blocks; name another one in prefix_cache.name")

    def record_answer(self, token_ids: TokenIdsLike, num_tokens: int, namespace: Namespace = DEFAULT) -> None:
        """Note that a prompt was answered with `num_tokens` tokens. Forgotten by default."""
        del token_ids, num_tokens, namespace

    def answers(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> tuple[PrefixAnswers, ...]:
        """Return what is known of answers to prompts that begin alike, by the longest prefix first.

        Counts nothing; costs as much as `match_prefix`. Answers are remembered with the blocks of their
        prompts, and longer if the cache remembers evicted ones. None by default.
        """
        del token_ids, namespace
        return ()

    def replace_policy(self, policy: EvictionPolicyProtocol) -> None:
        """Evict in the order of another policy from now on; what is cached, locked or pinned stays so.

        The new policy is told of every node (`on_insert`, parents first) and then of the unlocked leaves
        (`add_candidate`), both in order of last use, so that it begins as if it had seen the latest use of
        each. If it raises, the old one stays. By default raises EngineError: this cache keeps the
        policy that it was made with. May cost O(cache · log cache).
        """
        del policy
        raise EngineError(
            f"{type(self).__name__} cannot change its eviction policy; name another one in prefix_cache.name"
        )

    def keep_evicted(self, keep: Callable[[EvictedBlocks], None]) -> None:
        """Show `keep` what is about to be evicted, by the policy or for a quota, while its KV is intact.

        It is called in the middle of an eviction: it must not raise, nor call the cache. A cache that shows
        nothing never calls it.
        """
        del keep

    def subscribe(self, sink: KVEventSink) -> None:
        """Tell `sink` of every full block that enters or leaves, beginning with those already cached.

        A cache without events never calls it.
        """
        del sink

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
        block_ids: Sequence[int],
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

    def evict(self, num_blocks: int, *, namespace: Namespace | None = None) -> list[BlockId]:
        """Drop nothing."""
        return []

    def explain_miss(self, token_ids: TokenIdsLike, namespace: Namespace = DEFAULT) -> MissExplanation:
        """Say that prefix caching is off."""
        return MissExplanation(cause="disabled", num_tokens=len(token_ids), match_length=0, diverges_at=0)

    def clear(self) -> list[BlockId]:
        """Drop nothing."""
        return []

    def move_blocks(self, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Do nothing: no block is cached."""

    @property
    def num_evictable_blocks(self) -> int:
        """Always 0."""
        return 0

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Always 0."""
        return 0

    def metrics(self) -> PrefixCacheMetrics:
        """Return the lookups, all of them misses."""
        return PrefixCacheMetrics(num_lookups=self._num_lookups, num_lookup_tokens=self._num_lookup_tokens)

    def check_integrity(self) -> None:
        """Nothing can be wrong."""
