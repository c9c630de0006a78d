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

__version__ = "0.2.0"

_NAMES = {
    "sagellm.core.protocols.eviction": "CachedNode EvictionCandidate EvictionMetrics",
    ".arc": "ARCEvictionPolicy",
    ".belady": "BeladyEvictionPolicy",
    ".cost": "CostEvictionPolicy",
    ".fifo": "FIFOEvictionPolicy",
    ".lfu": "LFUEvictionPolicy",
    ".lru": "LRUEvictionPolicy",
    ".predictive": "PredictiveEvictionPolicy",
    ".qos": "QoSEvictionPolicy",
    ".ranked": "RankedEvictionPolicy",
    ".reuse": "ReuseEvictionPolicy",
    ".s3fifo": "S3FIFOEvictionPolicy",
    ".slru": "SLRUEvictionPolicy",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
