"""A cache whose eviction policy is replaced while it is used."""

from __future__ import annotations

import pytest

from sagellm.core.protocols.eviction import NullEvictionPolicy
from sagellm.core.runtime import Randomness, VirtualClock
from sagellm.kvmgr.prefix_cache import RadixPrefixCache
from sagellm.testing.eviction_audit import AuditingEvictionPolicy
from sagellm.testing.prefix_cache_model import PrefixCacheMachine


@pytest.mark.parametrize("block_size", [1, 3])
def test_random_operations_agree_with_a_plain_model_while_policies_change(block_size):
    cache = RadixPrefixCache(
        40,
        block_size,
        eviction_policy=AuditingEvictionPolicy(),
        clock=VirtualClock(),
    )
    machine = PrefixCacheMachine(cache, block_size, Randomness(block_size).stream("operations"))
    for _ in range(60):
        machine.run(50)
        cache.replace_policy(AuditingEvictionPolicy())
        cache.check_integrity()


class Failing(NullEvictionPolicy):
    def add_candidate(self, node):
        raise ZeroDivisionError("at the leaves")


def test_a_policy_that_fails_to_take_over_leaves_the_old_one():
    cache = RadixPrefixCache(40, 4, eviction_policy=AuditingEvictionPolicy())
    cache.insert_prefix(range(12), [0, 1, 2])
    with pytest.raises(ZeroDivisionError):
        cache.replace_policy(Failing())
    assert cache.metrics().policy_failure == ""
    assert sorted(cache.evict(2)) == [1, 2]


def test_a_policy_takes_the_place_of_one_that_failed():
    class Broken(NullEvictionPolicy):
        def victim(self):
            raise ZeroDivisionError("no victim")

    cache = RadixPrefixCache(40, 4, eviction_policy=Broken())
    cache.insert_prefix(range(12), [0, 1, 2])
    assert cache.evict(1) == [2]
    assert "no victim" in cache.metrics().policy_failure
    cache.replace_policy(NullEvictionPolicy())
    assert cache.metrics().policy_failure == ""
    assert cache.evict(1) == []
