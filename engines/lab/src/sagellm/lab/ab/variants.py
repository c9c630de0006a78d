"""Variants of a configuration: `order=mlfq,eviction=qos{within=reuse},scheduler.max_num_seqs=64`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sagellm.core import ConfigError, PluginError, PluginRegistry, ProviderSpec, UnknownProviderError, nearest
from sagellm.core.plugins.option_text import read_value, split
from sagellm.core.protocols.scheduler_ir import STAGES
from sagellm.engines.config.schema import PROVIDER_KINDS, EngineConfig
from sagellm.lab.simulation.oracle import MAX_ERROR

DEFAULT = "default"
EXACT = "exact"
"""As a predictor, one that knows each recorded length."""

_PIPELINE = "passes"
"""Before stages of the pipeline, as in `passes=order=mlfq,share=none`, it may be left out."""

_SHORT = {
    "eviction": "prefix_cache.eviction_policy",
    "predictor": "predictor.name",
    _PIPELINE: "scheduler.passes",
    **{stage: f"scheduler.{stage}" for stage in STAGES},
}
"""What a variant may write in short → the setting."""

_KEYS = {setting: short for short, setting in _SHORT.items()}

_SIMULATED = ("kv", "prefix_cache", "scheduler", "predictor")
"""Sections whose settings a simulation reads; the rest say how a model is run and served."""

KINDS = {short: PROVIDER_KINDS[key] for short, key in _SHORT.items()}
"""What a variant may write in short → the kind of provider that it names."""

_PRINTED = "scheduler.print"
"""For people who watch an engine; no run of a comparison prints."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One configuration under comparison. `oracle_error` is that of a predictor that knows the lengths."""

    name: str
    text: str
    config: EngineConfig
    oracle_error: float | None = None

    @property
    def num_kv_tokens(self) -> int:
        """Tokens for which there is KV; 0 while nobody has said how many blocks there are."""
        return (self.config.kv.num_blocks or 0) * self.config.kv.block_size

    def policies(self, *, is_served: bool) -> str:
        """Name the policies that decide something, as a variant would: `eviction=reuse,order=shortest`."""
        return ",".join(f"{key}={text}" for key, text in self._policies(is_served=is_served).items())

    def _policies(self, *, is_served: bool) -> dict[str, str]:
        named = ((_KEYS.get(each.key), each.spec.text) for each in self.config.providers())
        evicts = self.config.prefix_cache.enabled
        return {key: text for key, text in named if key and (evicts if key == "eviction" else is_served)}

    def not_named(self, other: Variant, *, is_served: bool) -> str:
        """Name the policies that tell it from another variant without standing in its text."""
        if self.text == DEFAULT:  # its label has them all
            return ""
        mine, theirs = (each._policies(is_served=is_served) for each in (self, other))
        named = {_KEYS.get(setting) for setting in _values(self.text)}
        different = (key for key in mine if key not in named and mine[key] != theirs.get(key))
        return ",".join(f"{key}={mine[key]}" for key in different)

    def is_same_as(self, other: Variant) -> bool:
        """Say whether both configure the same."""
        return self.config == other.config and self.oracle_error == other.oracle_error


def read_variant(name: str, text: str, config: EngineConfig, *, oracle_error: float | None = None) -> Variant:
    """Read what a variant changes in a configuration; `default` or nothing is the configuration itself.

    `oracle_error` is that of a predictor which the configuration has instead of its own. Raises ConfigError,
    which names the variant's flag, for what is unknown, impossible or given twice.
    """
    try:
        values = {} if text.strip() in ("", DEFAULT) else _values(text)
        predictor = values.get("predictor.name")
        error = oracle_error if predictor is None else None
        if predictor is not None and (spec := ProviderSpec.of(predictor)).name == EXACT:
            error = _error(spec.options)
            values["predictor.name"] = "null"  # it learns nothing, and is replaced
        changed = config.with_values(values)
        check_providers(changed)
    except (ConfigError, PluginError, UnknownProviderError) as fault:
        raise ConfigError(f"--{name} is {text!r}: {fault}") from fault
    return Variant(name=name, text=text.strip() or DEFAULT, config=changed, oracle_error=error)


def check_providers(config: EngineConfig) -> None:
    """Raise for a provider that a simulation would use and that is not installed."""
    registry = PluginRegistry.load()
    for named in config.providers():
        if named.key.partition(".")[0] in _SIMULATED:
            registry.choose(named.kind, named.spec)


def _values(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in split(text):
        slot = item.strip().removeprefix(f"{_PIPELINE}=")
        if slot.partition("=")[0].strip() in STAGES:
            item = slot
        key, equals, value = item.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not value:
            raise ConfigError(f"{item!r} gives no value; write key=value, as in eviction=lru")
        setting = _SHORT.get(key, key)
        if setting in values:
            raise ConfigError(f"{key} is given twice; keep one")
        _check_key(setting, key)
        values[setting] = value if setting in PROVIDER_KINDS else read_value(value)
    return values


def known_keys() -> list[str]:
    """Return what a variant may write before =."""
    settings = EngineConfig().values()
    simulated = (key for key in settings if key.partition(".")[0] in _SIMULATED and key != _PRINTED)
    return [*_SHORT, *simulated]


def _check_key(setting: str, key: str) -> None:
    known = known_keys()
    if setting in known:
        return
    if setting == "drafts" or setting.startswith("speculation."):
        raise ConfigError(
            f"{key}: drafts are not simulated, since tokens stand for blocks; try them in a running engine "
            "with `sage llm policy set drafts NAME`"
        )
    if setting == _PRINTED:
        raise ConfigError(f"{key} changes nothing that is compared; leave it out")
    if setting in EngineConfig().values():
        raise ConfigError(f"{key} changes nothing in a simulation; those of {', '.join(_SIMULATED)} do")
    raise ConfigError(f"{key!r} is not a setting; possible are {', '.join(known)}.{nearest(key, known)}")


def _error(options: Mapping[str, Any]) -> float:
    error = options.get("error", 0.0)
    if not options.keys() <= {"error"} or not isinstance(error, int | float) or not 0 <= error <= MAX_ERROR:
        raise ConfigError(
            f"{EXACT} has the options {dict(options)}; it takes error, a number from 0 to {MAX_ERROR}, the "
            "spread of its log-normal error"
        )
    return float(error)
