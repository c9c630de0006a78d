"""What a module says of itself in a notebook, a debugger or a log: one short line with its counts."""

from __future__ import annotations

import pytest

from sagellm.core import PluginRegistry
from sagellm.kvmgr.kv_pool import KVPoolConfig, MultiGranularKVPool
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

REGISTRY = PluginRegistry.load()
OPTIONS = {
    "kv_tier": {"max_bytes": 1 << 20},
    "kv_pool": {"total_blocks": 64},
    "kv_allocator": {"total_blocks": 64},
    "prefix_cache": {"max_blocks": 64},
    "eviction_policy": {},
}
MODULES = [
    (kind, entry.provider.name)
    for kind in OPTIONS
    for entry in REGISTRY.providers(kind)
    if entry.provider.name not in ("redis", "belady")
]


@pytest.mark.parametrize(("kind", "name"), MODULES)
def test_a_module_is_named_with_its_class_and_without_an_address(kind, name):
    made = REGISTRY.resolve(kind, name)(**OPTIONS[kind])
    shown = repr(made)
    assert shown.startswith(f"<{type(made).__name__}")
    assert (" object at 0x" in shown, "\n" in shown, len(shown) < 160) == (False, False, True), shown


def test_a_match_of_many_blocks_has_a_short_repr():
    cache = RadixPrefixCache(max_blocks=10_000, block_size=16)
    tokens = list(range(100_000))
    inserted = cache.insert_prefix(tokens, list(range(6250)))
    match = cache.match_prefix([*tokens[:50_000], 1])
    assert repr(match) == (
        "PrefixMatch(50000 tokens, 3125 blocks [0, 1, 2, 3, 4, 5, 6, 7, …], "
        "Namespace(tenant='default', salt='', adapter=''))"
    )
    assert "6250 blocks, 6250 new" in repr(inserted)
    assert [len(repr(each)) < 600 for each in (inserted, match.node, *cache.runs())] == [True] * 3
    assert repr(cache) == ("<RadixPrefixCache 6,250 of 10,000 blocks of 16 tokens, 1 nodes, LeafLRU>"), (
        "an address says nothing"
    )


def test_counts_follow_what_happens():
    pool = REGISTRY.resolve("kv_pool", "paged")(64, 16)
    assert repr(pool) == "<PagedKVPool 64 of 64 blocks of 16 tokens free, FreeListAllocator>"
    assert repr(MultiGranularKVPool(KVPoolConfig(total_tokens=4096))).endswith("tokens free>")
