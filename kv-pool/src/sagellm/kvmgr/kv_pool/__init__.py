"""KV block pool with reference counts and pluggable allocators, and tiers below it."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.kv_allocator import (
        AllocatorMetrics as AllocatorMetrics,
        KVAllocatorProtocol as KVAllocatorProtocol,
    )
    from sagellm.core.protocols.kv_pool import (
        BlockAllocationRequest as BlockAllocationRequest,
        BlockInfo as BlockInfo,
        Evictor as Evictor,
        KVPoolMetrics as KVPoolMetrics,
        KVPoolProtocol as KVPoolProtocol,
    )
    from sagellm.core.protocols.kv_tier import (
        KVTierMetrics as KVTierMetrics,
        KVTierProtocol as KVTierProtocol,
    )
    from sagellm.core.protocols.prefix_cache import KVBlockDescriptor as KVBlockDescriptor
    from sagellm.kvmgr.kv_pool.buddy import BuddyAllocator as BuddyAllocator
    from sagellm.kvmgr.kv_pool.extents import Extent as Extent, KVPoolConfig as KVPoolConfig
    from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator as FreeListAllocator
    from sagellm.kvmgr.kv_pool.migration import (
        BlockLocation as BlockLocation,
        LinkMoves as LinkMoves,
        MigrationPlan as MigrationPlan,
        Move as Move,
        plan_migration as plan_migration,
    )
    from sagellm.kvmgr.kv_pool.multi_granular import (
        MultiGranularKVPool as MultiGranularKVPool,
        MultiGranularMetrics as MultiGranularMetrics,
    )
    from sagellm.kvmgr.kv_pool.paged import GPUKVPool as GPUKVPool, PagedKVPool as PagedKVPool
    from sagellm.kvmgr.kv_pool.placement import (
        MemoryLink as MemoryLink,
        Place as Place,
        Placement as Placement,
    )
    from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier as BackendTier
    from sagellm.kvmgr.kv_pool.tiers.backends import (
        DDRBackend as DDRBackend,
        HBMBackend as HBMBackend,
        NVMeBackend as NVMeBackend,
        TierBackend as TierBackend,
    )
    from sagellm.kvmgr.kv_pool.tiers.background import BackgroundTier as BackgroundTier
    from sagellm.kvmgr.kv_pool.tiers.classifier import HotColdClassifier as HotColdClassifier
    from sagellm.kvmgr.kv_pool.tiers.offsets import OffsetAllocator as OffsetAllocator
    from sagellm.kvmgr.kv_pool.tiers.redis import RedisTier as RedisTier
    from sagellm.kvmgr.kv_pool.tiers.storage import (
        TieredKVStorage as TieredKVStorage,
        TieredMetrics as TieredMetrics,
    )

__version__ = "0.1.0"

__all__ = [
    "AllocatorMetrics",
    "BackendTier",
    "BackgroundTier",
    "BlockAllocationRequest",
    "BlockInfo",
    "BlockLocation",
    "BuddyAllocator",
    "DDRBackend",
    "Evictor",
    "Extent",
    "FreeListAllocator",
    "GPUKVPool",
    "HBMBackend",
    "HotColdClassifier",
    "KVAllocatorProtocol",
    "KVBlockDescriptor",
    "KVPoolConfig",
    "KVPoolMetrics",
    "KVPoolProtocol",
    "KVTierMetrics",
    "KVTierProtocol",
    "LinkMoves",
    "MemoryLink",
    "MigrationPlan",
    "Move",
    "MultiGranularKVPool",
    "MultiGranularMetrics",
    "NVMeBackend",
    "OffsetAllocator",
    "PagedKVPool",
    "Place",
    "Placement",
    "RedisTier",
    "TierBackend",
    "TieredKVStorage",
    "TieredMetrics",
    "__version__",
    "plan_migration",
]

__getattr__ = lazy(
    __name__,
    {
        "AllocatorMetrics": "sagellm.core.protocols.kv_allocator",
        "BackendTier": ".tiers.backend_tier",
        "BackgroundTier": ".tiers.background",
        "BlockAllocationRequest": "sagellm.core.protocols.kv_pool",
        "BlockInfo": "sagellm.core.protocols.kv_pool",
        "BlockLocation": ".migration",
        "BuddyAllocator": ".buddy",
        "DDRBackend": ".tiers.backends",
        "Evictor": "sagellm.core.protocols.kv_pool",
        "Extent": ".extents",
        "FreeListAllocator": ".free_list",
        "GPUKVPool": ".paged",
        "HBMBackend": ".tiers.backends",
        "HotColdClassifier": ".tiers.classifier",
        "KVAllocatorProtocol": "sagellm.core.protocols.kv_allocator",
        "KVBlockDescriptor": "sagellm.core.protocols.prefix_cache",
        "KVPoolConfig": ".extents",
        "KVPoolMetrics": "sagellm.core.protocols.kv_pool",
        "KVPoolProtocol": "sagellm.core.protocols.kv_pool",
        "KVTierMetrics": "sagellm.core.protocols.kv_tier",
        "KVTierProtocol": "sagellm.core.protocols.kv_tier",
        "LinkMoves": ".migration",
        "MemoryLink": ".placement",
        "MigrationPlan": ".migration",
        "Move": ".migration",
        "MultiGranularKVPool": ".multi_granular",
        "MultiGranularMetrics": ".multi_granular",
        "NVMeBackend": ".tiers.backends",
        "OffsetAllocator": ".tiers.offsets",
        "PagedKVPool": ".paged",
        "Place": ".placement",
        "Placement": ".placement",
        "RedisTier": ".tiers.redis",
        "TierBackend": ".tiers.backends",
        "TieredKVStorage": ".tiers.storage",
        "TieredMetrics": ".tiers.storage",
        "plan_migration": ".migration",
    },
)
