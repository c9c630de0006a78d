"""In which order the cache gives up its leaves when it is handed no policy."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Protocol

from sagellm.core.ids import NodeId
from sagellm.core.node_ranking import NodeRanking, RankingKey
from sagellm.core.protocols.eviction import CachedNode


class LeafOrder(Protocol):
    """The part of an eviction policy that a cache calls; EvictionPolicyProtocol says what it means."""

    def on_insert(self, node: CachedNode) -> None: ...  # noqa: D102
    def on_split(self, upper: CachedNode, lower: CachedNode) -> None: ...  # noqa: D102
    def on_resize(self, node: CachedNode, num_more: int) -> None: ...  # noqa: D102
    def on_hit(self, node: CachedNode) -> None: ...  # noqa: D102
    def on_remove(self, node: CachedNode) -> None: ...  # noqa: D102
    def add_candidate(self, node: CachedNode) -> None: ...  # noqa: D102
    def remove_candidate(self, node: CachedNode) -> None: ...  # noqa: D102
    def victim(self) -> CachedNode | None: ...  # noqa: D102
    def victims(self, num_blocks: int) -> Iterator[CachedNode]: ...  # noqa: D102
    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int: ...  # noqa: D102


class LeafLRU:
    """Unlocked leaves, least recently used first; of equal ones the older node."""

    def __init__(self) -> None:
        self._leaves = NodeRanking(attrgetter("last_access_ns"))

    def on_insert(self, node: CachedNode) -> None:
        """Recency is all that counts."""

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Recency is all that counts."""

    def on_resize(self, node: CachedNode, num_more: int) -> None:
        """Recency is all that counts."""

    def on_hit(self, node: CachedNode) -> None:
        """The node is locked by now; its time is read when it becomes a candidate."""

    def on_remove(self, node: CachedNode) -> None:
        """It was taken from the candidates before."""

    def add_candidate(self, node: CachedNode) -> None:
        """Rank a leaf by the time of its last use."""
        self._leaves.add(node)

    def remove_candidate(self, node: CachedNode) -> None:
        """Take a leaf out."""
        self._leaves.discard(node)

    def victim(self) -> CachedNode | None:
        """Return the leaf that was not used for the longest time."""
        return self._leaves.first()

    def victims(self, num_blocks: int) -> Iterator[CachedNode]:
        """Yield leaves that go whole."""
        return self._leaves.take(num_blocks)

    def num_victim_blocks(self, node: CachedNode, num_wanted: int) -> int:
        """Take all that is wanted."""
        del node
        return num_wanted

    def candidates(self) -> dict[NodeId, RankingKey]:
        """Return each candidate's time of use as it was when it became one."""
        return self._leaves.keys()
