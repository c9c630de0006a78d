"""KV block pool with reference counts and pluggable allocators."""

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
    from sagellm.kvmgr.kv_pool.buddy import BuddyAllocator as BuddyAllocator
    from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator as FreeListAllocator
    from sagellm.kvmgr.kv_pool.paged import GPUKVPool as GPUKVPool, PagedKVPool as PagedKVPool

__version__ = "0.1.0"

__all__ = [
    "AllocatorMetrics",
    "BlockAllocationRequest",
    "BlockInfo",
    "BuddyAllocator",
    "Evictor",
    "FreeListAllocator",
    "GPUKVPool",
    "KVAllocatorProtocol",
    "KVPoolMetrics",
    "KVPoolProtocol",
    "PagedKVPool",
    "__version__",
]

__getattr__ = lazy(
    __name__,
    {
        "AllocatorMetrics": "sagellm.core.protocols.kv_allocator",
        "BlockAllocationRequest": "sagellm.core.protocols.kv_pool",
        "BlockInfo": "sagellm.core.protocols.kv_pool",
        "BuddyAllocator": ".buddy",
        "Evictor": "sagellm.core.protocols.kv_pool",
        "FreeListAllocator": ".free_list",
        "GPUKVPool": ".paged",
        "KVAllocatorProtocol": "sagellm.core.protocols.kv_allocator",
        "KVPoolMetrics": "sagellm.core.protocols.kv_pool",
        "KVPoolProtocol": "sagellm.core.protocols.kv_pool",
        "PagedKVPool": ".paged",
    },
)
