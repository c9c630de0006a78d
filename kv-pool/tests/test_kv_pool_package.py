from __future__ import annotations

from importlib import import_module

from sagellm.core import KVAllocatorProtocol, KVPoolProtocol
from sagellm.kvmgr.kv_pool.plugin import sagellm_providers


def test_each_provider_keeps_its_kinds_protocol() -> None:
    found = {}
    for provider in sagellm_providers():
        module, _, name = provider.target.partition(":")
        found[provider.kind, provider.name] = getattr(import_module(module), name)
    assert found.keys() == {("kv_pool", "paged"), ("kv_allocator", "buddy"), ("kv_allocator", "free_list")}
    for name in ("buddy", "free_list"):
        allocator = found["kv_allocator", name](8)
        assert isinstance(allocator, KVAllocatorProtocol)
        pool = found["kv_pool", "paged"](8, 16, allocator=allocator, clock=None)
        assert isinstance(pool, KVPoolProtocol)
