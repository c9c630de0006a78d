from __future__ import annotations

import pytest

from sagellm.core import ConfigError, Namespace, Randomness, VirtualClock
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

A, B = Namespace("a"), Namespace("b")
DOCS = Namespace.public("docs")


def blocks(first, num_blocks):
    return list(range(first, first + num_blocks))


def make(**options):
    return RadixPrefixCache(20, 4, clock=VirtualClock(), **options)


def test_a_public_namespace_is_shared_and_charged_as_one():
    cache = make()
    cache.insert_prefix(range(8), blocks(0, 2), DOCS)
    assert cache.match_prefix(range(8), Namespace.public("docs")).match_length == 8
    for other in (A, Namespace.public("other"), Namespace(), Namespace("docs"), Namespace(salt="docs")):
        assert cache.match_prefix(range(8), other).match_length == 0
    assert cache.metrics().tenants["public:docs"].num_blocks == 2


def test_a_tenant_over_its_quota_evicts_only_its_own():
    cache = make(tenant_quotas={"a": 4})
    cache.insert_prefix(range(100, 132), blocks(50, 8), B)
    cache.insert_prefix(range(8), blocks(0, 2), A)
    cache.insert_prefix(range(10, 18), blocks(2, 2), A)
    refused = cache.insert_prefix(range(20, 28), blocks(4, 2), A)
    assert (refused.block_ids, refused.num_new_blocks) == ([], 0)
    assert sorted(cache.make_room(2, A)) == [0, 1]
    assert cache.insert_prefix(range(20, 28), blocks(4, 2), A).num_new_blocks == 2
    assert sorted(cache.evict(3, namespace=A)) == [2, 3, 5]
    assert cache.match_prefix(range(100, 132), B).match_length == 32
    cache.check_integrity()


def test_a_leaf_that_a_quota_cuts_loses_the_partial_blocks_behind_it():
    cache = make(tenant_quotas={"a": 4})
    cache.insert_prefix(range(14), blocks(0, 4), A)
    dropped = cache.make_room(3, A)
    assert cache.match_prefix([*range(4), 12, 13], A).match_length == 4
    assert sorted(dropped) == [1, 2, 3]
    assert cache.metrics().num_partial_blocks == 0
    cache.check_integrity()


def test_what_exceeds_no_quota_is_taken_in_the_order_of_the_policy():
    cache = make(tenant_quotas={"*": 10})
    cache.insert_prefix(range(100, 108), blocks(50, 2), B)
    cache.insert_prefix(range(8), blocks(0, 2), A)
    assert sorted(cache.evict(2, namespace=A)) == [50, 51]


def test_a_quota_for_everybody_holds_for_each():
    cache = make(tenant_quotas={"*": 2, "b": 3})
    for first, namespace in ((0, A), (10, B), (20, DOCS)):
        cache.insert_prefix(range(16), blocks(first, 4), namespace)
    usage = cache.metrics().tenants
    assert {name: (each.num_blocks, each.max_blocks) for name, each in usage.items()} == {
        "a": (2, 2),
        "b": (3, 3),
        "public:docs": (2, 2),
    }


def test_room_is_made_only_as_far_as_it_lacks():
    cache = make()
    cache.insert_prefix(range(72), blocks(0, 18), B)
    assert cache.make_room(2, A) == []
    assert len(cache.make_room(5, A)) == 3


@pytest.mark.no_cover
def test_the_accounts_agree_with_the_tree_after_10_000_random_operations():
    cache = make(tenant_quotas={"a": 6, "*": 9})
    random = Randomness(3).stream("operations")
    for index in range(10_000):
        namespace = random.choice((A, B, Namespace("b", "salt"), DOCS))
        tokens = random.choices((0, 1), k=random.randrange(24))
        cache.insert_prefix(tokens, blocks(8 * index, -(-len(tokens) // 4)), namespace)
        if random.random() < 0.5:
            cache.evict(random.randrange(4), namespace=random.choice((namespace, None)))
        else:
            cache.make_room(random.randrange(4), namespace)
        cache.check_integrity()
        for usage in cache.metrics().tenants.values():
            assert usage.num_blocks <= usage.max_blocks


def test_lookups_are_counted_for_whose_they_are():
    cache = make()
    cache.insert_prefix(range(8), blocks(0, 2), A)
    cache.lock(cache.match_prefix(range(10), A), num_lookup_tokens=10)
    cache.query_by_prefix(range(10), namespace=B)
    tenants = cache.metrics().tenants
    assert (tenants["a"].num_lookup_tokens, tenants["a"].num_hit_tokens) == (10, 8)
    assert (tenants["b"].num_lookups, tenants["b"].num_hit_tokens) == (1, 0)


@pytest.mark.parametrize(
    "options", [{"tenant_quotas": {"a": -1}}, {"max_pinned_blocks": -1}, {"tenant_quotas": {"a": 1.5}}]
)
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError, match="must be an int"):
        make(**options)


def test_accounts_without_blocks_are_bounded_and_those_with_blocks_stay():
    cache = RadixPrefixCache(64, 2)
    cache.insert_prefix([1, 2], [1], Namespace("full"))
    cache.insert_prefix([1], [2], Namespace("partial"))
    for number in range(25_000):
        cache.query_by_prefix([1, 2], namespace=Namespace(f"t{number}"))
    tenants = cache.metrics().tenants
    assert 5_000 < len(tenants) <= 10_002
    assert {"full", "partial", "t24999"} <= tenants.keys()
    assert (tenants["partial"].num_blocks, tenants["partial"].num_partial_blocks) == (0, 1)
    cache.insert_prefix([1, 2], [2], Namespace("partial"))
    grown = cache.metrics().tenants["partial"]
    assert (grown.num_blocks, grown.num_partial_blocks) == (1, 0)
    cache.check_integrity()
