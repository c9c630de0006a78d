from __future__ import annotations

from importlib import import_module

import pytest

from sagellm.core import LifetimePredictorProtocol
from sagellm.kvmgr.lifetime.plugin import sagellm_providers

PROVIDERS = {provider.name: provider for provider in sagellm_providers()}


def test_the_names_are_those_that_are_documented() -> None:
    assert set(PROVIDERS) == {"statistical", "lstm", "transformer", "ranker", "online"}


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_provider_keeps_its_kinds_protocol(name: str) -> None:
    assert PROVIDERS[name].kind == "lifetime_predictor"
    module, _, target = PROVIDERS[name].target.partition(":")
    assert isinstance(getattr(import_module(module), target)(), LifetimePredictorProtocol)
