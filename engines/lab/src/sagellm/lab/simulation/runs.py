"""Replays a trace under several policies and capacities, and computes the bounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from sagellm.core import ConfigError, InvalidInputError, PluginRegistry, ProviderSpec, TraceRequest
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.metrics.cache import gap_closed, token_saving
from sagellm.engines.progress import Advance
from sagellm.lab.simulation.bounds import (
    count_known_tokens,
    replay,
    replay_belady,
    replay_unlimited,
)
from sagellm.lab.simulation.figures import CacheFigures, figures_of
from sagellm.lab.simulation.replay import ReplayedRequest

LRU, OUR_LRU = "lru", "sagellm-eviction-policy:lru"
BELADY = "belady"
NO_CACHE = "off"
"""Given as a policy, turns the prefix cache off: the control."""


@dataclass(frozen=True, kw_only=True)
class CacheRun:
    """One policy, with its options in the short form, at one capacity."""

    eviction_policy: str
    capacity: int
    figures: CacheFigures
    gap_closed: float | None  # share of LRU's distance to Belady; None if either is missing
    requests: list[ReplayedRequest] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """All runs over a trace, in the order of capacities and policies, and the unlimited cache."""

    block_size: int
    upper_bound: float  # token saving of a cache that never evicts
    ideal: float  # token saving of one that is not divided into blocks either
    runs: list[CacheRun]


def simulate(
    requests: Seq[TraceRequest],
    config: EngineConfig,
    *,
    capacities: Seq[int],
    policies: Seq[str],
    advance: Advance,
) -> Simulation:
    """Replay a trace under every policy at every capacity, and once without limit."""
    if any(capacity < 1 for capacity in capacities):
        raise ConfigError(f"capacities are {list(capacities)}; each must be at least one block")
    unlimited = replay_unlimited(requests, config, advance)
    block_size = config.kv.block_size
    runs: list[CacheRun] = []
    for capacity in capacities:
        done: dict[str, tuple[CacheFigures, list[ReplayedRequest]]] = {}
        for policy in policies:
            replayed = _replay(requests, config, policy, capacity, advance)
            done[policy] = (
                figures_of(replayed, unlimited, capacity=capacity, block_size=block_size),
                replayed,
            )
        saved = {policy: figures.token_saving for policy, (figures, _) in done.items()}
        runs += [
            CacheRun(
                eviction_policy=policy,
                capacity=capacity,
                figures=figures,
                gap_closed=_gap_closed(saved, policy),
                requests=replayed,
            )
            for policy, (figures, replayed) in done.items()
        ]
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    return Simulation(
        block_size=block_size,
        upper_bound=token_saving(sum(one.num_saved_tokens for one in unlimited), num_tokens),
        ideal=token_saving(sum(count_known_tokens(requests)), num_tokens),
        runs=runs,
    )


def _replay(
    requests: Seq[TraceRequest], config: EngineConfig, policy: str, capacity: int, advance: Advance
) -> list[ReplayedRequest]:
    config = config.with_values({"kv.num_blocks": capacity})
    spec = ProviderSpec.of(policy)
    if spec.options and spec.name in (BELADY, NO_CACHE):
        raise ConfigError(f"the bound {spec.name!r} takes no options; leave {dict(spec.options)} out")
    if spec.name == BELADY:
        return replay_belady(requests, config, advance)
    if spec.name == NO_CACHE:
        return replay(requests, config.with_values({"prefix_cache.enabled": False}), advance)
    if spec.options or spec.name != config.prefix_cache.eviction_policy.name:
        config = config.with_values({"prefix_cache.eviction_policy": spec})
    return replay(requests, config, advance)


def with_bounds(policies: Seq[str]) -> list[str]:
    """Return policies plus LRU and the optimum; LRU is ours even if a plugin offers another."""
    if OUR_LRU in policies:
        return list(dict.fromkeys((*policies, BELADY)))
    providers = PluginRegistry.load().providers("eviction_policy")
    num_offered = sum(entry.provider.name == LRU for entry in providers)
    return list(dict.fromkeys((*policies, LRU if num_offered < 2 else OUR_LRU, BELADY)))


def _gap_closed(saved: dict[str, float], policy: str) -> float | None:
    lru = next((name for name in (OUR_LRU, LRU) if name in saved), None)
    if lru is None or BELADY not in saved or policy in (lru, BELADY, NO_CACHE):
        return None
    try:
        return gap_closed(saved[policy], saved[lru], saved[BELADY])
    except InvalidInputError:  # LRU is the optimum
        return None
