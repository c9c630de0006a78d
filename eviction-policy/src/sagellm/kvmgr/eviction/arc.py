"""Adaptive replacement: recency against frequency, as the load wants it."""

from __future__ import annotations

from collections import OrderedDict

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.segmented import SegmentedEvictionPolicy


class ARCEvictionPolicy(SegmentedEvictionPolicy):
    """Keeps a queue of nodes that were used once and one of those used again, and learns their sizes.

    When something comes back that was evicted from one of them, that queue was too small. After N.
    Megiddo and D. Modha, "ARC: a self-tuning, low overhead replacement cache" (2003), over nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._target = 0.0  # young nodes that are wanted
        self._evicted_young: OrderedDict[NodeId, None] = OrderedDict()
        self._evicted_kept: OrderedDict[NodeId, None] = OrderedDict()

    def order(self, node: CachedNode) -> float:
        """The last use, in nanoseconds."""
        return node.last_access_ns

    def enter(self, node: CachedNode) -> None:
        """Adapt to what came back; that is kept."""
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
        """Take from the queue that is larger than it shall be."""
        return self.num_young > self._target

    def leave(self, node: CachedNode) -> None:
        """Remember from which queue it went; no more of these than there are nodes."""
        ghosts = self._evicted_kept if node.node_id in self.kept else self._evicted_young
        ghosts[node.node_id] = None
        while len(ghosts) > max(64, len(self.nodes)):
            ghosts.popitem(last=False)
