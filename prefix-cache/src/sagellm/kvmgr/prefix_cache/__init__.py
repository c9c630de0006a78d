"""Radix prefix cache for LLM serving: token-exact, block-aligned, multi-tenant."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.core.protocols.prefix_cache import (
        InsertResult as InsertResult,
        KVBlockDescriptor as KVBlockDescriptor,
        PrefixCacheMetrics as PrefixCacheMetrics,
        PrefixMatch as PrefixMatch,
    )
    from sagellm.kvmgr.prefix_cache.node import PrefixNode as PrefixNode
    from sagellm.kvmgr.prefix_cache.radix import RadixPrefixCache as RadixPrefixCache
    from sagellm.kvmgr.prefix_cache.reuse import CrossRequestKVCache as CrossRequestKVCache

__version__ = "0.1.0"

__all__ = [
    "CrossRequestKVCache",
    "InsertResult",
    "KVBlockDescriptor",
    "PrefixCacheMetrics",
    "PrefixMatch",
    "PrefixNode",
    "RadixPrefixCache",
    "__version__",
]

_CORE = "sagellm.core.protocols.prefix_cache"

__getattr__ = lazy(
    __name__,
    {
        "CrossRequestKVCache": ".reuse",
        "InsertResult": _CORE,
        "KVBlockDescriptor": _CORE,
        "PrefixCacheMetrics": _CORE,
        "PrefixMatch": _CORE,
        "PrefixNode": ".node",
        "RadixPrefixCache": ".radix",
    },
)
