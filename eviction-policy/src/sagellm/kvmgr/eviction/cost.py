"""Evicts first what is cheap to compute again."""

from __future__ import annotations

from operator import attrgetter

from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class CostEvictionPolicy(RankedEvictionPolicy):
    """Evicts what has the lowest worth: cost of recomputing a block × number of uses, plus the cache's age.

    A token at position p costs 1 + p ÷ `attention_depth`: the linear layers, and attention over the tokens
    before it, equal at `attention_depth` tokens (for a layer of width h, about 6 h). The worth of a
    victim is added to all later entries, so that blocks valuable long ago are evicted in the end. After
    Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching" (1998).
    """

    sequence_keys = (attrgetter("access_count"), attrgetter("last_access_time"))

    def __init__(self, *, attention_depth: int = 8192) -> None:
        super().__init__()
        self._attention_depth = attention_depth
        self._age = self._named_worth = 0.0

    def node_key(self, node: CachedNode) -> float:
        """The worth of a block at the node's end."""
        return self._age + (1 + node.access_count) * (1 + node.depth / self._attention_depth)

    def on_remove(self, node: CachedNode) -> None:
        """Age the cache by the worth of a victim."""
        if node.node_id == self._named:
            self._age = max(self._age, self._named_worth)
        super().on_remove(node)

    def victim(self) -> CachedNode | None:
        """Return the leaf with the lowest worth, or None if there is none."""
        node = super().victim()
        if node is not None:
            worth = self._ranking.key_of(node)
            assert isinstance(worth, float), "node_key returns one"
            self._named_worth = worth
        return node
