"""First in, first out."""

from __future__ import annotations

from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class FIFOEvictionPolicy(RankedEvictionPolicy):
    """Evicts what entered first, however often used since: a baseline, and for one-off work.

    A candidate does not say when its sequence began, so `select_victims` takes the order in which
    candidates are given as their order of arrival.
    """

    def node_key(self, node: CachedNode) -> float:
        """When the node entered the tree, in nanoseconds."""
        return node.created_ns
