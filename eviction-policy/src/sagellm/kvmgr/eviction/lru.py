"""Least recently used first."""

from __future__ import annotations

from operator import attrgetter

from sagellm.core.protocols.eviction import CachedNode
from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy


class LRUEvictionPolicy(RankedEvictionPolicy):
    """Evicts what was unused for the longest time: for chat, where turns follow each other soon."""

    sequence_keys = (attrgetter("last_access_time"),)

    def node_key(self, node: CachedNode) -> float:
        """By last use, in nanoseconds."""
        return node.last_access_ns
