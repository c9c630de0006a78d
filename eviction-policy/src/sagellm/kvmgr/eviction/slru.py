"""Segmented LRU: evicts nodes never hit before nodes that were hit."""

from __future__ import annotations

from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.segmented import SegmentedEvictionPolicy


class SLRUEvictionPolicy(SegmentedEvictionPolicy):
    """Evicts what was never hit, least recently used first, and then the rest in the same order.

    A hit protects a node; when more than `protected_share` of all nodes are protected, the least
    recently used leaf among them goes back on probation. After Karedla, Love and Wherry, "Caching
    strategies to improve disk system performance" (1994).
    """

    def __init__(self, *, protected_share: float = 0.8) -> None:
        super().__init__()
        self._protected_share = protected_share

    def enter(self, node: CachedNode) -> None:
        """All begin young."""

    def use(self, node: CachedNode) -> None:
        """Protect it, and unprotect another node if there are too many."""
        self.keep(node)
        if len(self.kept) > self._protected_share * len(self.nodes):
            oldest = self.kept_leaves.first()
            if oldest is not None:
                self.keep(oldest, kept=False)

    def takes_young(self) -> bool:
        """Take nodes on probation first."""
        return True
