"""Tenants, and the numbers that stand for names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, strategies as st

from sagellm.core import DEFAULT_TENANT, Tenant
from sagellm.core.tenant import hash_of


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_number_that_stands_for_a_name_fits_a_signed_column(name: str) -> None:
    assert 0 <= hash_of(name) < 1 << 63
    assert hash_of(name) == hash_of(name)


def test_numbers_of_names_are_spread() -> None:
    assert len({hash_of(f"request-{number}") for number in range(20_000)}) == 20_000


def test_a_number_is_the_same_in_every_process() -> None:
    code = "from sagellm.core.tenant import hash_of; print(hash_of('red'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == hash_of("red")


def test_a_tenant_has_a_code_that_is_its_name_alone() -> None:
    assert Tenant("red").code == Tenant("red", 5.0, is_trusted=True).code == hash_of("red")
    assert Tenant("red") != Tenant("red", 5.0)
    assert "code" not in repr(Tenant("red"))
    with pytest.raises(FrozenInstanceError):
        DEFAULT_TENANT.weight = 2.0  # type: ignore[misc]


def test_the_default_tenant_weighs_1_and_is_not_trusted() -> None:
    assert (DEFAULT_TENANT.name, DEFAULT_TENANT.weight, DEFAULT_TENANT.is_trusted) == ("default", 1.0, False)
