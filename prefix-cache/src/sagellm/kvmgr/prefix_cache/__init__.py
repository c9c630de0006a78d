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
    from sagellm.kvmgr.prefix_cache.cross_request import CrossRequestKVCache as CrossRequestKVCache
    from sagellm.kvmgr.prefix_cache.node import PrefixNode as PrefixNode
    from sagellm.kvmgr.prefix_cache.radix import RadixPrefixCache as RadixPrefixCache

__version__ = "0.2.0"

_NAMES = {
    "sagellm.core.protocols.prefix_cache": "InsertResult KVBlockDescriptor PrefixCacheMetrics PrefixMatch",
    ".node": "PrefixNode",
    ".radix": "RadixPrefixCache",
    ".cross_request": "CrossRequestKVCache",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
