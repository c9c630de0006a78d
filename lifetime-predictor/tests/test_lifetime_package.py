from __future__ import annotations

from importlib import import_module

import pytest

import sagellm.kvmgr.lifetime as package
from sagellm.core import LifetimePredictorProtocol
from sagellm.kvmgr.lifetime.plugin import sagellm_providers


def test_every_public_name_can_be_had() -> None:
    assert package.__all__ == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError):
        package.NoSuchPredictor  # noqa: B018


def test_the_provider_keeps_its_kinds_protocol() -> None:
    (provider,) = sagellm_providers()
    assert (provider.kind, provider.name) == ("lifetime_predictor", "statistical")
    module, _, name = provider.target.partition(":")
    predictor = getattr(import_module(module), name)(window=10)
    assert isinstance(predictor, LifetimePredictorProtocol)
