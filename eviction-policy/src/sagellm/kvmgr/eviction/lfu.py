"""Least frequently used first."""

from __future__ import annotations

from sagellm.core.node_ranking import RankingKey
from sagellm.core.protocols.eviction import CachedNode, EvictionCandidate
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class LFUEvictionPolicy(RankedEvictionPolicy):
    """Evicts what was used least often, of equals what was not used for the longest time.

    Counts go on where a node comes back that the cache remembers, so that a conversation that was
    evicted between two turns does not begin anew. What was used often long ago stays.
    """

    def node_key(self, node: CachedNode) -> RankingKey:
        """Hits, then the last use."""
        return (node.access_count, node.last_access_ns)

    def candidate_key(self, candidate: EvictionCandidate) -> RankingKey:
        """Uses, then the last one."""
        return (candidate.access_count, candidate.last_access_time)
