"""The cost of moving and computing KV, from a file of measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core import ConfigError
from sagellm.engines.config.bounded_json import parse_json


@dataclass(frozen=True, kw_only=True)
class TierCosts:
    """Rates of one machine and model shape: the size of a token's KV, computing it, and each tier."""

    kv_bytes_per_token: int
    prefill_ns_per_token: float
    prefill_ns_per_token_context: float  # per token in each token's context
    tier_bytes_per_s: Mapping[str, float]

    def __post_init__(self) -> None:
        positive = {
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "prefill_ns_per_token": self.prefill_ns_per_token,
            **{f"tier_bytes_per_s.{name}": rate for name, rate in self.tier_bytes_per_s.items()},
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be above 0")
        if not (context_ns := self.prefill_ns_per_token_context) >= 0:
            raise ConfigError(f"prefill_ns_per_token_context is {context_ns!r}; it must be at least 0")

    def compute_ns(self, start: int, num_tokens: int) -> float:
        """Return how long computing `num_tokens` tokens after `start` others takes."""
        return self.prefill_ns_per_token * num_tokens + self.prefill_ns_per_token_context * self.sum_context(
            start, num_tokens
        )

    def fetch_ns(self, tier: str, num_tokens: int) -> int:
        """Return how long fetching the KV of `num_tokens` tokens from a tier takes."""
        return round(num_tokens * self.kv_bytes_per_token * 1e9 / self.tier_bytes_per_s[tier])

    @staticmethod
    def sum_context(start: int, num_tokens: int) -> float:
        """Return how many tokens are attended to, summed over `num_tokens` tokens after `start` others."""
        return num_tokens * (start + num_tokens / 2)


def read_tier_costs(path: Path) -> dict[str, TierCosts]:
    """Read sets of costs by name; values at the top of the file apply to every set.

    Raises ConfigError for a malformed file, and for rates that are not positive.
    """
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"no costs can be read from {path}: {error}") from error
    known = TierCosts.__dataclass_fields__
    try:
        common = {name: content[name] for name in known if name in content}
        return {
            name: TierCosts(**{key: value for key, value in (common | given).items() if key in known})
            for name, given in content["sets"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"no costs can be read from {path}: {error!r}") from error
