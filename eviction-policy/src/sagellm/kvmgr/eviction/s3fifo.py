"""S3-FIFO: queues instead of recency; evicts one-hit wonders quickly."""

from __future__ import annotations

from sagellm.core.ids import NodeId
from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.segmented import SegmentedEvictionPolicy

_MOST_USES = 3


class S3FIFOEvictionPolicy(SegmentedEvictionPolicy):
    """A small queue for new nodes, a large one for nodes hit there or back after their eviction.

    Both are first in, first out, but a node hit in between goes to the end of the large one instead.
    After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), over nodes.
    """

    def __init__(self, *, small_share: float = 0.1) -> None:
        super().__init__()
        self._small_share = small_share
        self._entered: dict[NodeId, int] = {}
        self._uses: dict[NodeId, int] = {}  # since it entered its queue
        self._num_entered = 0

    def order(self, node: CachedNode) -> float:
        """By the time of entry into its queue."""
        return self._entered.get(node.node_id, 0)

    def enter(self, node: CachedNode) -> None:
        """Begin in the small queue, or in the large one if it was here before."""
        self._enter(node)
        if node.former_id is not None:
            self.keep(node)

    def on_split(self, upper: CachedNode, lower: CachedNode) -> None:
        """Put the new part in the same place as the old one."""
        super().on_split(upper, lower)
        self._entered[upper.node_id] = self._entered.get(lower.node_id, 0)
        self._uses[upper.node_id] = self._uses.get(lower.node_id, 0)

    def use(self, node: CachedNode) -> None:
        """Count it, up to three."""
        self._uses[node.node_id] = min(_MOST_USES, self._uses.get(node.node_id, 0) + 1)

    def leave(self, node: CachedNode) -> None:
        """Forget it."""
        self._entered.pop(node.node_id, None)
        self._uses.pop(node.node_id, None)

    def takes_young(self) -> bool:
        """Take from the small queue while it is larger than its share."""
        return self.num_young > self._small_share * len(self.nodes)

    def victim(self) -> CachedNode | None:
        """Move on the leaves that were hit, and return the first one that was not."""
        while (node := super().victim()) is not None and self._uses.get(node.node_id):
            is_young = node.node_id not in self.kept
            self._enter(node, uses=0 if is_young else self._uses[node.node_id] - 1)
            self.keep(node)
        return node

    def _enter(self, node: CachedNode, uses: int = 0) -> None:
        self._num_entered += 1
        self._entered[node.node_id] = self._num_entered
        self._uses[node.node_id] = uses
