"""The results of a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from sagellm.core.ids import BlockId
from sagellm.core.kv_block import BlockHeader
from sagellm.core.namespace import DEFAULT, Namespace
from sagellm.core.protocols.eviction import CachedNode
from sagellm.core.protocols.kv_events import RemovalReason
from sagellm.core.tokens import TokenIds

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

    num_lookups: int
    num_hits: int  # lookups that matched at least one token
    num_lookup_tokens: int
    num_hit_tokens: int
    num_nodes: int
    num_blocks: int  # full and partial ones; the sum over all tenants
    num_locked_blocks: int
    max_blocks: int
    num_inserted_blocks: int
    num_evicted_blocks: int  # all that left, including replaced partial ones
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
