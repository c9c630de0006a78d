"""Eviction policies for KV caches, each a plugin."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.eviction import (
        CachedNode as CachedNode,
        EvictionCandidate as EvictionCandidate,
        EvictionMetrics as EvictionMetrics,
    )
    from sagellm.kvmgr.eviction.belady import BeladyEvictionPolicy as BeladyEvictionPolicy
    from sagellm.kvmgr.eviction.fifo import FIFOEvictionPolicy as FIFOEvictionPolicy
    from sagellm.kvmgr.eviction.lru import LRUEvictionPolicy as LRUEvictionPolicy
    from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy as RankedEvictionPolicy
    from sagellm.kvmgr.eviction.reuse import ReuseEvictionPolicy as ReuseEvictionPolicy

__version__ = "0.1.0"

__all__ = [
    "BeladyEvictionPolicy",
    "CachedNode",
    "EvictionCandidate",
    "EvictionMetrics",
    "FIFOEvictionPolicy",
    "LRUEvictionPolicy",
    "RankedEvictionPolicy",
    "ReuseEvictionPolicy",
    "__version__",
]

_CORE = "sagellm.core.protocols.eviction"

__getattr__ = lazy(
    __name__,
    {
        "BeladyEvictionPolicy": ".belady",
        "CachedNode": _CORE,
        "EvictionCandidate": _CORE,
        "EvictionMetrics": _CORE,
        "FIFOEvictionPolicy": ".fifo",
        "LRUEvictionPolicy": ".lru",
        "RankedEvictionPolicy": ".ranked",
        "ReuseEvictionPolicy": ".reuse",
    },
)
