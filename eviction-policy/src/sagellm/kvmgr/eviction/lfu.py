"""Least frequently used first."""

from __future__ import annotations

from operator import attrgetter

from sagellm.core.node_ranking import RankingKey
from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class LFUEvictionPolicy(RankedEvictionPolicy):
    """Evicts what was used least often, of equals what was not used for the longest time.

    Counts go on where a node comes back that the cache remembers, so that a conversation that was
    evicted between two turns does not begin anew. What was used often long ago stays.
    """

    sequence_keys = (attrgetter("access_count"), attrgetter("last_access_time"))

    def node_key(self, node: CachedNode) -> RankingKey:
        """Hits, then the last use."""
        return (node.access_count, node.last_access_ns)
