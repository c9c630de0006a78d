"""Adaptive replacement: balances recency and frequency by the load."""

from __future__ import annotations

from collections import OrderedDict
from typing import Self

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.segmented import SegmentedEvictionPolicy


class ARCEvictionPolicy(SegmentedEvictionPolicy):
    """Keeps one queue of nodes used once and one of nodes used again, and adapts their sizes.

    When a node that was evicted from one of them comes back, that queue was too small. After N.
    Megiddo and D. Modha, "ARC: a self-tuning, low overhead replacement cache" (2003), over nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._target = 0.0  # target number of young nodes
        self._evicted_young: OrderedDict[NodeId, None] = OrderedDict()
        self._evicted_kept: OrderedDict[NodeId, None] = OrderedDict()

    def learn_from(self, other: Self) -> None:
        """Take over the target."""
        self._target = other._target

    def enter(self, node: CachedNode) -> None:
        """Adapt to a node that came back, and keep it."""
        former = node.former_id
        if former is None:
            return
        young, kept = self._evicted_young, self._evicted_kept
        if former in young:
            self._target = min(len(self.nodes), self._target + max(1.0, len(kept) / len(young)))
            del young[former]
        elif former in kept:
            self._target = max(0.0, self._target - max(1.0, len(young) / len(kept)))
            del kept[former]
        self.keep(node)

    def use(self, node: CachedNode) -> None:
        """Keep it."""
        self.keep(node)

    def takes_young(self) -> bool:
        """Take from the queue that exceeds its target."""
        return self.num_young > self._target

    def leave(self, node: CachedNode) -> None:
        """Remember from which queue it was evicted, for at most as many nodes as there are now."""
        ghosts = self._evicted_kept if node.node_id in self.kept else self._evicted_young
        ghosts[node.node_id] = None
        while len(ghosts) > max(64, len(self.nodes)):
            ghosts.popitem(last=False)
