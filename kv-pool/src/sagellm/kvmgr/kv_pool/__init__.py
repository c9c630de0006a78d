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
    from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator as FreeListAllocator
    from sagellm.kvmgr.kv_pool.multi_granular import (
        Extent as Extent,
        KVPoolConfig as KVPoolConfig,
        MultiGranularKVPool as MultiGranularKVPool,
        MultiGranularMetrics as MultiGranularMetrics,
    )
    from sagellm.kvmgr.kv_pool.paged import GPUKVPool as GPUKVPool, PagedKVPool as PagedKVPool
    from sagellm.kvmgr.kv_pool.placement import (
        BlockLocation as BlockLocation,
        LinkMoves as LinkMoves,
        MemoryLink as MemoryLink,
        MigrationPlan as MigrationPlan,
        Move as Move,
        Place as Place,
        Placement as Placement,
        plan_migration as plan_migration,
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

__version__ = "0.2.0"

_NAMES = {
    "sagellm.core.protocols.kv_allocator": "AllocatorMetrics KVAllocatorProtocol",
    "sagellm.core.protocols.kv_pool": """
        BlockAllocationRequest BlockInfo Evictor KVPoolMetrics KVPoolProtocol
    """,
    "sagellm.core.protocols.kv_tier": "KVTierMetrics KVTierProtocol",
    "sagellm.core.protocols.prefix_cache": "KVBlockDescriptor",
    ".buddy": "BuddyAllocator",
    ".free_list": "FreeListAllocator",
    ".multi_granular": "Extent KVPoolConfig MultiGranularKVPool MultiGranularMetrics",
    ".paged": "GPUKVPool PagedKVPool",
    ".placement": "BlockLocation LinkMoves MemoryLink MigrationPlan Move Place Placement plan_migration",
    ".tiers.backend_tier": "BackendTier",
    ".tiers.backends": "DDRBackend HBMBackend NVMeBackend TierBackend",
    ".tiers.background": "BackgroundTier",
    ".tiers.classifier": "HotColdClassifier",
    ".tiers.offsets": "OffsetAllocator",
    ".tiers.redis": "RedisTier",
    ".tiers.storage": "TieredKVStorage TieredMetrics",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
