"""Namespaces and versions, and names that moved to the engine."""

from __future__ import annotations

import pytest

from sagellm.core import Namespace, version
from sagellm.core.namespace import DEFAULT


def test_the_default_namespace_is_one_like_any_other() -> None:
    assert Namespace() == DEFAULT == ("default", "", "")
    assert len({DEFAULT, Namespace("a"), Namespace("default", "s"), Namespace(adapter="x")}) == 4


@pytest.mark.parametrize(
    ("core", "accepted"), [(0, {0}), (1, {1}), (2, {1, 2}), (5, {4, 5})], ids=lambda value: str(value)
)
def test_a_version_and_the_one_before_are_accepted_once_there_are_stable_ones(
    core: int, accepted: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "SAGELLM_API", core)
    assert {api for api in range(-1, 8) if version.is_compatible(api)} == accepted
