from __future__ import annotations

from importlib import import_module

from sagellm.core import LifetimePredictorProtocol
from sagellm.kvmgr.lifetime.plugin import sagellm_providers


def test_the_provider_keeps_its_kinds_protocol() -> None:
    (provider,) = sagellm_providers()
    assert (provider.kind, provider.name) == ("lifetime_predictor", "statistical")
    module, _, name = provider.target.partition(":")
    predictor = getattr(import_module(module), name)(window=10)
    assert isinstance(predictor, LifetimePredictorProtocol)
