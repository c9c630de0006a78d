"""Least frequently used first."""

from __future__ import annotations

from operator import attrgetter

from sagellm.core.node_ranking import RankingKey
from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class LFUEvictionPolicy(RankedEvictionPolicy):
    """Evicts the least often used leaf, the least recently used among equals.

    Counts resume when a node that the cache remembers comes back, so that a conversation evicted
    between two turns does not start from zero. What was used often long ago stays.
    """

    sequence_keys = (attrgetter("access_count"), attrgetter("last_access_time"))

    def node_key(self, node: CachedNode) -> RankingKey:
        """By hits, then by last use."""
        return (node.access_count, node.last_access_ns)
