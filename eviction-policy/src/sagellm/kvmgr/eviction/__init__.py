"""Eviction policies for KV caches, each a plugin."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.eviction import (
        CachedNode as CachedNode,
        EvictionCandidate as EvictionCandidate,
        EvictionMetrics as EvictionMetrics,
    )
    from sagellm.kvmgr.eviction.arc import ARCEvictionPolicy as ARCEvictionPolicy
    from sagellm.kvmgr.eviction.belady import BeladyEvictionPolicy as BeladyEvictionPolicy
    from sagellm.kvmgr.eviction.cost import CostEvictionPolicy as CostEvictionPolicy
    from sagellm.kvmgr.eviction.fifo import FIFOEvictionPolicy as FIFOEvictionPolicy
    from sagellm.kvmgr.eviction.lfu import LFUEvictionPolicy as LFUEvictionPolicy
    from sagellm.kvmgr.eviction.lru import LRUEvictionPolicy as LRUEvictionPolicy
    from sagellm.kvmgr.eviction.predictive import PredictiveEvictionPolicy as PredictiveEvictionPolicy
    from sagellm.kvmgr.eviction.qos import QoSEvictionPolicy as QoSEvictionPolicy
    from sagellm.kvmgr.eviction.ranked import RankedEvictionPolicy as RankedEvictionPolicy
    from sagellm.kvmgr.eviction.reuse import ReuseEvictionPolicy as ReuseEvictionPolicy
    from sagellm.kvmgr.eviction.s3fifo import S3FIFOEvictionPolicy as S3FIFOEvictionPolicy
    from sagellm.kvmgr.eviction.slru import SLRUEvictionPolicy as SLRUEvictionPolicy

__version__ = "0.1.0"

__all__ = [
    "ARCEvictionPolicy",
    "BeladyEvictionPolicy",
    "CachedNode",
    "CostEvictionPolicy",
    "EvictionCandidate",
    "EvictionMetrics",
    "FIFOEvictionPolicy",
    "LFUEvictionPolicy",
    "LRUEvictionPolicy",
    "PredictiveEvictionPolicy",
    "QoSEvictionPolicy",
    "RankedEvictionPolicy",
    "ReuseEvictionPolicy",
    "S3FIFOEvictionPolicy",
    "SLRUEvictionPolicy",
    "__version__",
]

_CORE = "sagellm.core.protocols.eviction"

__getattr__ = lazy(
    __name__,
    {
        "ARCEvictionPolicy": ".arc",
        "LFUEvictionPolicy": ".lfu",
        "S3FIFOEvictionPolicy": ".s3fifo",
        "SLRUEvictionPolicy": ".slru",
        "BeladyEvictionPolicy": ".belady",
        "CachedNode": _CORE,
        "CostEvictionPolicy": ".cost",
        "EvictionCandidate": _CORE,
        "EvictionMetrics": _CORE,
        "FIFOEvictionPolicy": ".fifo",
        "LRUEvictionPolicy": ".lru",
        "PredictiveEvictionPolicy": ".predictive",
        "QoSEvictionPolicy": ".qos",
        "RankedEvictionPolicy": ".ranked",
        "ReuseEvictionPolicy": ".reuse",
    },
)
