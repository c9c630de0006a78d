"""Files that say what steps cost on some machine: a stated roofline, or a fit to measured steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sagellm.core import ConfigError, InvalidInputError, StepCost, StepWork
from sagellm.engines.config.bounded_json import parse_json
from sagellm.lab.files import write_json

_REQUIRED = ("source", "device", "step")
_AMOUNTS = ("kv_bytes_per_token", "kv_memory_bytes")
_HOST = ("host_step_ns", "host_request_ns")


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What a step costs on one machine with one model, and how much KV fits.

    `source` says where the numbers come from; `about` is whatever else the file says. Sizes are None where
    unknown. What the host does between two steps takes `host_step_ns`, and `host_request_ns` more for each
    request that it takes in.
    """

    source: str
    device: Literal["cpu", "cuda"]
    step: StepCost
    kv_bytes_per_token: int | None = None
    kv_memory_bytes: int | None = None
    host_step_ns: float = 0.0
    host_request_ns: float = 0.0
    tier_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def num_blocks(self, block_size: int) -> int | None:
        """Return how many blocks of KV fit; None if the file does not say."""
        if self.kv_bytes_per_token is None or self.kv_memory_bytes is None:
            return None
        return self.kv_memory_bytes // (self.kv_bytes_per_token * block_size)

    def prefill_ns(self, num_tokens: int, start: int = 0) -> float:
        """Return how long one step takes that computes a prompt alone, after its first `start` tokens."""
        return self.step.predict_ns(prefill_work(num_tokens, start)) if num_tokens else 0.0

    def fetch_ns(self, tier: str, num_tokens: int) -> int:
        """Return how long fetching the KV of so many tokens from a tier takes."""
        if self.kv_bytes_per_token is None or tier not in self.tier_bytes_per_s:
            raise ConfigError(
                f"kv.tiers has {tier!r}; the costs need kv_bytes_per_token and tier_bytes_per_s.{tier} to "
                "simulate it"
            )
        return round(num_tokens * self.kv_bytes_per_token * 1e9 / self.tier_bytes_per_s[tier])


def prefill_work(num_tokens: int, start: int = 0) -> StepWork:
    """Return the work of a step that computes a prompt alone, after its first `start` tokens."""
    end = start + num_tokens
    return StepWork(num_tokens, 1, end, num_tokens * (start + end) // 2, int(num_tokens > 1))


def read_step_costs(path: Path) -> StepCosts:
    """Read a file of costs. Raises ConfigError, which names the file and the key."""
    try:
        content = parse_json(path.read_bytes())
        if not isinstance(content, dict):
            raise ConfigError(f"it holds a {type(content).__name__}; it must be an object")
        return _costs(content)
    except OSError as error:
        raise ConfigError(f"the costs {path} cannot be read: {error.strerror}") from error
    except (ConfigError, InvalidInputError) as error:
        raise ConfigError(f"the costs {path}: {error}") from error


def write_step_costs(path: Path, costs: StepCosts) -> None:
    """Write a file that `read_step_costs` reads. Raises ConfigError if it cannot be written."""
    values = {name: value for name, value in asdict(costs).items() if name != "about" and value}
    write_json(path, values | dict(costs.about), "costs")


def _costs(content: Mapping[str, Any]) -> StepCosts:
    for name in _REQUIRED:
        if name not in content:
            raise ConfigError(f"{name} is missing; a file of step costs has {', '.join(_REQUIRED)}")
    if content["device"] not in ("cpu", "cuda"):
        raise ConfigError(f"device is {content['device']!r}; it must be cpu or cuda")
    if not isinstance(content["source"], str) or not content["source"]:
        raise ConfigError("source must be a text that says where the numbers come from")
    rates = _mapping(content, "tier_bytes_per_s")
    for tier, rate in rates.items():
        if not rate > 0:
            raise ConfigError(f"tier_bytes_per_s.{tier} is {rate}; it must be above 0")
    for name in _AMOUNTS:
        value = content.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be an int of at least 1")
    known = StepCosts.__dataclass_fields__
    step = StepCost.of(_mapping(content, "step"))
    if not any(asdict(step).values()):
        raise ConfigError("every coefficient of step is 0; a step takes time")
    return StepCosts(
        source=content["source"],
        device=content["device"],
        step=step,
        kv_bytes_per_token=content.get("kv_bytes_per_token"),
        kv_memory_bytes=content.get("kv_memory_bytes"),
        tier_bytes_per_s=rates,
        **_host(content),
        about={name: value for name, value in content.items() if name not in known},
    )


def _host(content: Mapping[str, Any]) -> dict[str, float]:
    found = {name: content[name] for name in _HOST if name in content}
    for name, value in found.items():
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{name} is {value!r}; it must be a number of at least 0")
    return found


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, float]:
    given = content.get(name, {})
    if not isinstance(given, dict):
        raise ConfigError(f"{name} is {given!r}; it must be an object of numbers")
    for key, value in given.items():
        if type(value) not in (int, float):
            raise ConfigError(f"{name}.{key} is {value!r}; it must be a number")
    return given
