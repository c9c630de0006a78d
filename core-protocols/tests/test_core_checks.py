"""What is handed to a constructor is checked there, and the error says what to hand in."""

from __future__ import annotations

import pytest

from sagellm.core import ConfigError, EvictionPolicyProtocol, require_object
from sagellm.core.protocols.eviction import NullEvictionPolicy


def check(value: object) -> None:
    require_object("eviction_policy", value, EvictionPolicyProtocol, "eviction_policy")


def is_accepted(value: object) -> bool:
    try:
        check(value)
    except ConfigError:
        return False
    return True


def test_an_object_with_the_methods_will_do() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> object:
            return getattr(NullEvictionPolicy(), name)

    assert is_accepted(NullEvictionPolicy())
    assert is_accepted(Proxy())
    assert not is_accepted(object())


def test_a_name_gets_the_line_that_resolves_it() -> None:
    with pytest.raises(ConfigError) as caught:
        check("lru")
    assert str(caught.value) == (
        "eviction_policy is 'lru'; it must be an object with the methods of EvictionPolicyProtocol; by name: "
        "PluginRegistry.load().resolve('eviction_policy', 'lru')(…)"
    )


def test_a_class_is_to_be_called() -> None:
    with pytest.raises(
        ConfigError, match=r"is the class NullEvictionPolicy; .* make one: NullEvictionPolicy"
    ):
        check(NullEvictionPolicy)


def test_what_lacks_methods_is_told_which() -> None:
    with pytest.raises(ConfigError, match=r"of type int; .* it lacks add_candidate, metrics, .*victim"):
        check(7)
