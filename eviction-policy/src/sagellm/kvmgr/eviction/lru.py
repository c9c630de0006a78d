"""Least recently used first."""

from __future__ import annotations

from sagellm.core.protocols.eviction import CachedNode, EvictionCandidate
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class LRUEvictionPolicy(RankedEvictionPolicy):
    """Evicts what was not used for the longest time: for chat, where turns follow each other soon."""

    def node_key(self, node: CachedNode) -> float:
        """The last use, in nanoseconds."""
        return node.last_access_ns

    def candidate_key(self, candidate: EvictionCandidate) -> float:
        """The last use, in the caller's unit."""
        return candidate.last_access_time
