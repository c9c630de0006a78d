"""Flags of commands that simulate serving, and the configuration, load and limits that they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import ConfigError, ProviderSpec
from sagellm.core.plugins.option_text import split
from sagellm.engines.cli.engine_flags import group_of, setting_flag
from sagellm.engines.cli.names import complete_providers
from sagellm.engines.config.sources import load_config
from sagellm.lab.cli.flags import flag

if TYPE_CHECKING:
    from sagellm.core import TraceRequest
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.lab.simulation.served_load import LoadSettings
    from sagellm.lab.simulation.serving_figures import ServingLimits

_flag = partial(flag, group="Serving (with --cost)")

_SETTINGS = {
    "num_blocks": "kv.num_blocks",
    "kv_tiers": "kv.tiers",
    "kv_fetch": "kv.fetch",
    "enable_prefix_caching": "prefix_cache.enabled",
    "scheduler": "scheduler.name",
    "step_target_ms": "scheduler.step_target_ms",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_seqs": "scheduler.max_num_seqs",
    "lifetime_predictor": "predictor.name",
}

_LIMITS = {"max_ttft_s": "ttft_s", "max_ttft_prefills": "ttft_prefills", "max_tpot_ms": "tpot_ms"}

TRACE_FLAGS = (
    setting_flag("prefix_cache", "prefix_cache.name"),
    flag("block_size", int, "INT", "Tokens in a block; else the trace's own, else 16.", min=1),
    flag(
        "reader",
        str,
        "NAME",
        "The trace's reader; else the file shows its format.",
        autocompletion=complete_providers("trace_reader"),
    ),
    flag("limit", int, "INT", "Replay only this many of its requests.", min=1),
)
"""How a trace is read, whether it is served or replayed."""

SERVING_FLAGS = (
    _flag("cost", Path, "FILE", "Simulate serving, with steps that take what this file says."),
    _flag(
        "stretch",
        float,
        "FLOAT",
        "Multiply arrival times by this; below 1, the load is heavier. [default: 1]",
    ),
    setting_flag("scheduler_passes", "scheduler.passes", "--passes"),
    _flag("max_ttft_s", float, "SECONDS", "A good request's time to its first token … [default: 2]", min=0),
    _flag(
        "max_ttft_prefills", float, "FLOAT", "… plus this many times its prompt's own. [default: 3]", min=0
    ),
    _flag("max_tpot_ms", float, "MS", "Its milliseconds per token after the first. [default: 50]", min=0),
    _flag("tenant_weights", str, "LIST", "Weights of tenants: a=3,b=1; others have 1."),
    flag(
        "num_blocks",
        str,
        "INT",
        "KV blocks, as many as the server has. [default: what the memory in the costs holds; none without "
        "--cost]",
        group=group_of("kv.num_blocks"),
    ),
    *(setting_flag(name, key) for name, key in _SETTINGS.items() if name != "num_blocks"),
)
"""Flags that `--cost` reads, besides the trace's and those of what is written."""


def read_settings(
    requests: Sequence[TraceRequest], options: Mapping[str, Any], config: Path | None
) -> EngineConfig:
    """Return the configuration that flags and files say, with the trace's block size."""
    names = (*_SETTINGS, "scheduler_passes", "prefix_cache")
    flags = {name: options[name] for name in names if name in options}
    settings = load_config(flags, config_file=config).config
    policies = [name for text in options.get("eviction_policy") or () for name in split(text)]
    if len(policies) > 1:
        raise ConfigError(f"--eviction-policy names {len(policies)} policies; serving is simulated with one")
    if policies:
        settings = settings.with_values({"prefix_cache.eviction_policy": ProviderSpec.of(policies[0])})
    return with_block_size(settings, requests, options.get("block_size"))


def with_block_size(
    settings: EngineConfig, requests: Sequence[TraceRequest], block_size: int | None
) -> EngineConfig:
    """Choose the block size: the one given, else the trace's own, else the configuration's."""
    own = max((one.block_tokens for one in requests), default=0)
    size = block_size or own or settings.kv.block_size
    if own % size:
        raise ConfigError(f"--block-size is {size}; the trace names blocks of {own} tokens: give a divisor")
    return settings.with_values({"kv.block_size": size})


def read_limits(options: Mapping[str, Any]) -> ServingLimits:
    """Return what a good request must meet."""
    from sagellm.lab.simulation.serving_figures import ServingLimits

    return ServingLimits(**{name: options[given] for given, name in _LIMITS.items() if given in options})


def read_load(options: Mapping[str, Any]) -> LoadSettings:
    """Return how a trace is run."""
    from sagellm.lab.simulation.served_load import LoadSettings

    weights: dict[str, float] = {}
    for part in split(options.get("tenant_weights") or ""):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--tenant-weights has {part!r}; write name=2.5") from None
    return LoadSettings(stretch=options.get("stretch", 1.0), weights=weights)
