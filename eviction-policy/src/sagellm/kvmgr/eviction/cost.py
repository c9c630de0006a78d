"""What is cheap to compute again goes first."""

from __future__ import annotations

from operator import attrgetter

from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class CostEvictionPolicy(RankedEvictionPolicy):
    """Evicts what costs least: recomputing a block × how often it was used, plus the age of the cache.

    A token at position p costs 1 + p ÷ `attention_depth`: the linear layers, and attention over what is
    before it, equal at `attention_depth` tokens (for a layer of width h, about 6 h). What a victim was
    worth is added to all that enters later, so that what was dear long ago goes in the end. After
    Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching" (1998).
    """

    sequence_keys = (attrgetter("access_count"), attrgetter("last_access_time"))

    def __init__(self, *, attention_depth: int = 8192) -> None:
        super().__init__()
        self._attention_depth = attention_depth
        self._age = self._named_worth = 0.0

    def node_key(self, node: CachedNode) -> float:
        """Worth of a block at the node's end."""
        return self._age + (1 + node.access_count) * (1 + node.depth / self._attention_depth)

    def on_remove(self, node: CachedNode) -> None:
        """Let the cache grow older by the worth of a victim."""
        if node.node_id == self._named:
            self._age = max(self._age, self._named_worth)
        super().on_remove(node)

    def victim(self) -> CachedNode | None:
        """Return the leaf that is worth least, or None when there is none."""
        node = super().victim()
        if node is not None:
            worth = self._ranking.key_of(node)
            assert isinstance(worth, float), "node_key returns one"
            self._named_worth = worth
        return node
