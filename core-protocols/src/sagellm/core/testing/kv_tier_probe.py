"""Whether a tier can be tested where it stores blocks, and what earlier tests have left in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tier import KVTierProtocol, TierRequest, run_to_end
from sagellm.core.testing.kv_tier import make_data, make_header, put
from sagellm.core.testing.kv_tier_model import MODEL


def delete_blocks_of_the_kit(tier: KVTierProtocol) -> None:
    """Make a persistent tier forget the blocks of earlier tests, and no others."""
    old = [header for header, _ in tier.stored() if header.model_fingerprint == MODEL]
    run_to_end(tier, [TierRequest("delete", header) for header in old])


def probe_tier(factory: Callable[..., Any]) -> Any:
    """Make a tier, and check that its storage is available, and not in use by others.

    Raises ConfigError if not.
    """
    tier = factory(1 << 20)
    try:
        delete_blocks_of_the_kit(tier)
        num_others, outcome = tier.metrics().num_blocks, put(tier, make_header(1), make_data(1))
        delete_blocks_of_the_kit(tier)
        tier.close()
    except Exception:  # the tests will report it
        return tier
    if num_others:
        raise ConfigError(f"it has {num_others} blocks of somebody already; the kit needs a place of its own")
    if outcome == "failed":
        raise ConfigError("a put failed, so its server or device is not there")
    return tier
