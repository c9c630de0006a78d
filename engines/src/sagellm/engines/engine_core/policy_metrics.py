"""Which policies an engine can switch, and what it counts of them. Loads nothing heavy: commands read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sagellm.core import ConfigError, ProviderSpec
from sagellm.core.errors import nearest
from sagellm.engines.config.shown import shown


class PolicyKind(NamedTuple):
    """A kind of policy that a running engine can switch."""

    provider_kind: str
    setting: str  # what a restart reads
    flag: str  # the same, of the commands
    what: str


KINDS: Mapping[str, PolicyKind] = {
    "eviction": PolicyKind(
        "eviction_policy",
        "prefix_cache.eviction_policy",
        "--eviction-policy",
        "which cached blocks go first when room is needed",
    ),
    "passes": PolicyKind(
        "scheduler_pass",
        "scheduler.passes",
        "--scheduler-passes",
        "who runs in the next step, and how much",
    ),
    "predictor": PolicyKind(
        "lifetime_predictor",
        "predictor.name",
        "--lifetime-predictor",
        "how long outputs are expected to become",
    ),
    "drafts": PolicyKind(
        "draft_proposer", "speculation.proposer", "--speculation", "which tokens a step verifies ahead"
    ),
}
"""By the name that operators use."""


def kind_of(given: object) -> str:
    """Return a kind by its name, or by that of its providers. Raises ConfigError."""
    by_provider = {each.provider_kind: name for name, each in KINDS.items()}
    if isinstance(given, str) and (name := by_provider.get(given, given)) in KINDS:
        return name
    raise ConfigError(
        f"the kind of policy is {shown(given)}; what can be switched is {', '.join(KINDS)}."
        f"{nearest(str(given), [*KINDS, *by_provider])}"
    )


@dataclass(frozen=True, kw_only=True)
class PolicyMetrics:
    """The policies in force by kind, and how often each kind was switched, by whom."""

    policies: dict[str, str] = field(default_factory=dict)
    num_changes: dict[str, dict[str, int]] = field(default_factory=dict)
    num_guards: int = 0

    def in_force(self, provider_kind: str) -> str | None:
        """Return the name of the provider in force; None if there is none, or this kind is not switched."""
        kind = next((name for name, each in KINDS.items() if each.provider_kind == provider_kind), "")
        text = self.policies.get(kind)
        return None if text is None or text in ("off", "none") else ProviderSpec.of(text).name


@dataclass(frozen=True, kw_only=True)
class ShadowFigures:
    """What one policy would have saved: a share of the prompt tokens, with its 95 % interval if sampled."""

    policy: str
    hit_rate: float
    low: float | None = None
    high: float | None = None
    recent_hit_rate: float = 0.0  # of the latest window
    recent_low: float | None = None
    recent_high: float | None = None
    num_hit_tokens: int = 0
    failure: str = ""  # of the policy, which is least recently used from then on


@dataclass(frozen=True, kw_only=True)
class ShadowMetrics:
    """All shadows since they began; `hit_rate` and `recent_hit_rate` are the engine's of these requests."""

    sample: float = 1.0  # share of the blocks that are simulated
    num_requests: int = 0
    num_waiting: int = 0  # that an earlier request keeps from being taken in
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    hit_rate: float = 0.0
    recent_hit_rate: float = 0.0
    num_recent: int = 0  # requests in the latest window
    seconds: float = 0.0  # that the shadows took
    shadows: list[ShadowFigures] = field(default_factory=list)
