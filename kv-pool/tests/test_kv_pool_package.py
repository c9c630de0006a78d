from __future__ import annotations

from importlib import import_module

from sagellm.core import (
    UNNAMED,
    KVAllocatorProtocol,
    KVMemory,
    KVOffloadProtocol,
    KVPoolProtocol,
    KVTierProtocol,
)
from sagellm.core.protocols.forward import NullForwardBackend
from sagellm.kvmgr.kv_pool.plugin import sagellm_providers

MEMORY = KVMemory(NullForwardBackend(), 16, 64, UNNAMED)


def test_each_provider_keeps_its_kinds_protocol() -> None:
    found = {}
    for provider in sagellm_providers():
        module, _, name = provider.target.partition(":")
        found[provider.kind, provider.name] = getattr(import_module(module), name)
    assert found.keys() == {
        ("kv_pool", "paged"),
        *(("kv_allocator", name) for name in ("buddy", "free_list")),
        *(("kv_tier", name) for name in ("host", "file", "redis")),
        ("kv_offload", "tiered"),
        ("kv_saves", "file"),
    }
    host = found["kv_tier", "host"](4096)
    assert isinstance(host, KVTierProtocol)
    assert isinstance(found["kv_offload", "tiered"](MEMORY, tiers={"host": host}), KVOffloadProtocol)
    for name in ("buddy", "free_list"):
        allocator = found["kv_allocator", name](8)
        assert isinstance(allocator, KVAllocatorProtocol)
        pool = found["kv_pool", "paged"](8, 16, allocator=allocator, clock=None)
        assert isinstance(pool, KVPoolProtocol)
