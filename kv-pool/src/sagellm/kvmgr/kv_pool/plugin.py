"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl

_PACKAGE = "sagellm.kvmgr.kv_pool"


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider("kv_pool", "paged", f"{_PACKAGE}.paged:PagedKVPool", "blocks counted by reference"),
        Provider("kv_offload", "tiered", f"{_PACKAGE}.offload:tiered", "tiers below each other"),
        Provider("kv_saves", "file", f"{_PACKAGE}.saves:KVSaves", "one file of the tier `file` each"),
        Provider("kv_tier", "host", f"{_PACKAGE}.tiers.providers:host_tier", "host memory"),
        Provider("kv_tier", "file", f"{_PACKAGE}.tiers.providers:file_tier", "a file, as on an NVMe disk"),
        Provider("kv_tier", "redis", f"{_PACKAGE}.tiers.providers:redis_tier", "a Redis or Valkey server"),
        Provider("kv_allocator", "buddy", f"{_PACKAGE}.buddy:BuddyAllocator", "few and long runs"),
        Provider("kv_allocator", "free_list", f"{_PACKAGE}.free_list:FreeListAllocator", "last freed first"),
    ]
