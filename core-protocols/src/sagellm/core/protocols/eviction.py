"""Which cached blocks to give up first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from sagellm.core.ids import NodeId
from sagellm.core.namespace import DEFAULT, Namespace


@dataclass(slots=True, eq=False, kw_only=True)
class CachedNode:
    """What a policy may know of a node. The cache keeps it up to date; a policy only reads it.

    Times are nanoseconds on the cache's clock. `former_id` is the node that last held the beginning
    of these tokens, if it was evicted and the cache remembers it: it marks a node that came back after its
    eviction, and the counts continue from those of the former node.
    """

    node_id: NodeId
    num_blocks: int
    depth: int  # tokens from the root to the node's end
    created_ns: int
    last_access_ns: int
    access_count: int = 0  # hits since it entered the tree
    priority: int = 0
    namespace: Namespace = DEFAULT
    former_id: NodeId | None = None
    former_access_ns: int = 0  # last use of the former node
    former_depth: int = 0  # tokens from the root to the end of the part known before, which may have gone

    @property
    def parent_id(self) -> NodeId | None:
        """The node that this one continues; None at the top, or if the cache does not say."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """A sequence whose blocks could be evicted: the stateless form of the same question."""

    sequence_id: str
    block_ids: Sequence[int]
    last_access_time: float
    access_count: int = 0
    priority: int = 0
    is_pinned: bool = False
    estimated_lifetime: float | None = None  # tokens still to come, if predicted
    tenant: str = DEFAULT.tenant


@dataclass(kw_only=True)
class EvictionMetrics:
    """Counts of one policy since it was made."""

    num_inserted: int = 0
    num_hits: int = 0
    num_victims: int = 0  # named by `victim` or `victims`, and removed then
    num_candidates: int = 0  # unlocked leaves at this moment
    details: dict[str, float] = field(default_factory=dict)


class EvictionPolicyProtocol(ABC):
    """Ranks the unlocked leaves of one prefix cache.

    Providers are called as `factory(lifetime_predictor=...)`; one that has this keyword is given a
    new predictor of the configured kind, which is its own to ask and to teach.

    The cache calls `on_insert` when a node enters the tree, `on_hit` when its blocks are reused and
    `on_remove` when it leaves; in between, `add_candidate` and `remove_candidate` say when the node
    becomes an unlocked leaf and when it stops being one (locked, or given a child). `victim` names
    the next one to go; the cache then calls `remove_candidate` and `on_remove` for it. A hit on a
    locked node is reported as well.

    Every call is O(log n) or better in the number of nodes, none blocks, and the policy never
    calls back. All calls come from one thread at a time. A node that is split is reported to
    `on_split`: its upper part is new and inherits the counts; the lower part keeps its id.

    `num_blocks` and `depth` of a node change when it is split, and otherwise with `on_resize`: it grew at
    its end, or a victim gave up only its end and remains a candidate. When `last_access_ns` of
    a candidate changes without a hit (its prefix was inserted again), the cache removes it and
    adds it again.
    """

    def learn_from(self, other: Self) -> None:
        """Take over what another one, of equal options, has learnt of the load, and none of its nodes.

        Called once, before any other call, by an engine that switches to a policy whose shadow has run beside
        the old one. The other goes on, so that nothing that changes may be shared. Nothing by default.
        """
        del other

    @abstractmethod
    def on_insert(self, node: CachedNode) -> None:
        """A node entered the tree. It is not a candidate yet."""

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """A node was split: `upper`, which is not a candidate, is now before it. An insert by default."""
        del lower
        self.on_insert(upper)

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        """A node has gained (or, if negative, lost) this many blocks at its end. Ignored by default."""
        del node, num_more

    @abstractmethod
    def on_hit(self, node: CachedNode) -> None:
        """Blocks of the node are being reused; its counts are already updated.

        A path is hit as a whole, its deepest node first.
        """

    @abstractmethod
    def on_remove(self, node: CachedNode) -> None:
        """The node left the tree. Its id is never reused."""

    @abstractmethod
    def add_candidate(self, node: CachedNode) -> None:
        """The node became an unlocked leaf and may be chosen."""

    @abstractmethod
    def remove_candidate(self, node: CachedNode) -> None:
        """The node must not be chosen until it is added again."""

    @abstractmethod
    def victim(self) -> CachedNode | None:
        """Return the candidate to evict first, or None if there is none. Changes no order."""

    def victims(self, num_blocks: int) -> Iterator[CachedNode]:
        """Yield candidates to evict whole, in eviction order, of at most `num_blocks` blocks together.

        The fast way to evict many: the policy forgets what it yields, without calls of `remove_candidate` and
        `on_remove`. The cache removes each node before it asks for the next, and may call `add_candidate` for
        its parent, which may come next. For any blocks still needed at the end, the cache calls `victim`: a
        policy stops when a victim should give up only its end; the default stops at once.
        """
        del num_blocks
        return iter(())

    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int:
        """Return how many of the wanted blocks the victim gives up from its end, at least one.

        Called before blocks are taken from a victim that `victim` named; by default all that are wanted. A
        node that gave up only some of its blocks remains a candidate, and `victim` is called again.
        """
        del node
        return num_wanted

    @abstractmethod
    def select_victims(self, candidates: Sequence[EvictionCandidate], required_blocks: int) -> Sequence[str]:
        """Choose sequences whose blocks together cover `required_blocks`, in eviction order.

        Stateless: depends on the arguments alone. Never chooses a pinned candidate; returns all
        unpinned ones when even they do not suffice, and nothing when `required_blocks` < 1.
        """

    @abstractmethod
    def metrics(self) -> EvictionMetrics:
        """Return the counts so far."""

    def __repr__(self) -> str:
        counts = self.metrics()
        shown = f"{counts.num_candidates:,} candidates, {counts.num_victims:,} victims so far"
        return f"<{type(self).__name__} {shown}>"


class NullEvictionPolicy(EvictionPolicyProtocol):
    """Protects everything: never names a victim, so a full cache stays as it is."""

    def on_insert(self, node: CachedNode) -> None:
        """Ignore it."""

    on_hit = on_remove = add_candidate = remove_candidate = on_insert

    def victim(self) -> CachedNode | None:
        """Name nothing."""
        return None

    def select_victims(self, candidates: Sequence[EvictionCandidate], required_blocks: int) -> Sequence[str]:
        """Choose nothing."""
        return []

    def metrics(self) -> EvictionMetrics:
        """Return zeros."""
        return EvictionMetrics()
