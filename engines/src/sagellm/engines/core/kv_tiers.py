"""Makes the tiers below the device as a configuration names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core import ConfigError, KVTierProtocol, Runtime, SageLLMError, StoreKey, nearest
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.kv_memory import KVMemory
from sagellm.engines.core.kv_offload import KVOffload
from sagellm.engines.core.kv_saves import KVSaves
from sagellm.engines.core.save_folder import SaveFolder, default_save_folder
from sagellm.engines.modules import Modules
from sagellm.engines.plugin_failure import plugin_failure
from sagellm.engines.sizes import parse_bytes

_JOINING = "tiered"
"""The provider that makes one tier of several."""

_FROM_ENGINE = ("runtime", "store_key")
"""Parameters of factories that the engine passes, so they are not options."""


class TierPlan(NamedTuple):
    """One tier of `kv.tiers` as it is to be made."""

    key: str
    label: str  # as errors call the provider
    factory: Callable[..., KVTierProtocol]
    max_bytes: int
    options: dict[str, Any]


def read_tiers(modules: Modules) -> dict[str, TierPlan]:
    """Read `kv.tiers` by name, but for those of no bytes, which are off.

    Raises ConfigError for invalid sizes, options that a tier does not take, and an unreadable `kv.store_key`.
    """
    _store_key(modules)
    plans = {name: _plan(modules, name, given) for name, given in modules.config.kv.tiers.items()}
    return {name: plan for name, plan in plans.items() if plan.max_bytes}


def build_offload(modules: Modules, memory: KVMemory, runtime: Runtime) -> KVOffload | None:
    """Make the tiers of `kv.tiers` and join them; None if there are none.

    Raises ConfigError as `read_tiers` does, and for what a tier cannot be made with.
    """
    plans = read_tiers(modules)
    if not plans:
        return None
    with ExitStack() as closing:
        tiers = {}
        for name, plan in plans.items():
            tiers[name] = _make_tier(plan, runtime, _store_key(modules))
            closing.callback(tiers[name].close)
        joined = modules.make("kv_tier", _JOINING, 0, runtime=runtime, tiers=tiers)
        closing.pop_all()
    return KVOffload(
        joined,
        memory.backend,
        memory.identity,
        block_size=memory.layout.block_size,
        block_bytes=memory.layout.block_bytes,
        rule=modules.config.kv.fetch,
    )


def build_saves(
    modules: Modules, memory: KVMemory, kv: KVCacheManager, fingerprint: Callable[[], str], runtime: Runtime
) -> KVSaves:
    """Make what saves and loads the prefix cache, in files of the tier `file`."""
    settings = modules.config.kv
    folder = Path(settings.save_folder) if settings.save_folder else default_save_folder()

    def open_tier(max_bytes: int, name: str) -> KVTierProtocol:
        options = {"folder": str(folder), "name": name}
        label, factory = modules.label("kv_tier", "file"), modules.factory("kv_tier", "file")
        plan = TierPlan("kv.save_folder", label, factory, max_bytes, options)
        return _make_tier(plan, runtime, _store_key(modules))

    saves = SaveFolder(folder, runtime.files, parse_bytes(settings.max_saved, "kv.max_saved"))
    return KVSaves(kv, memory, saves, open_tier, fingerprint, clock=runtime.clock)


def _plan(modules: Modules, name: str, given: object) -> TierPlan:
    key, factory = f"kv.tiers.{name}", modules.factory("kv_tier", name)
    if factory is modules.factory("kv_tier", _JOINING):
        raise ConfigError(f"{key}: this one joins the others by itself; name those alone, as host and file")
    options: dict[str, Any] = {}
    if isinstance(given, Mapping):
        options = dict(given)
        if "max_bytes" not in options:
            raise ConfigError(f"{key}.max_bytes is missing; give bytes, as in 4GiB")
        max_bytes = parse_bytes(options.pop("max_bytes"), f"{key}.max_bytes")
    else:
        max_bytes = parse_bytes(given, key)
    _check_options(factory, key, options)
    return TierPlan(key, modules.label("kv_tier", name), factory, max_bytes, options)


def _check_options(factory: Callable[..., Any], key: str, options: Mapping[str, Any]) -> None:
    """Compare names alone: a value may be a secret."""
    _, *parameters = signature(factory).parameters.values()
    named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    takes = [name for name in named if name not in _FROM_ENGINE]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name in options:
        if not isinstance(name, str) or name in _FROM_ENGINE or not (takes_any or name in takes):
            known = ", ".join(["max_bytes", *takes])
            raise ConfigError(f"{key} has no option {name!r}; it takes {known}.{nearest(str(name), takes)}")
    try:
        signature(factory).bind(0, runtime=None, **options)
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from error


def _store_key(modules: Modules) -> StoreKey | None:
    """Read the configured key; None lets each tier use its default."""
    source = modules.config.kv.store_key
    return None if source is None else StoreKey.named(source)


def _make_tier(plan: TierPlan, runtime: Runtime, store_key: StoreKey | None) -> KVTierProtocol:
    options = dict(plan.options)
    if "store_key" in signature(plan.factory).parameters:
        options["store_key"] = store_key
    try:
        return plan.factory(plan.max_bytes, runtime=runtime, **options)
    except ConfigError as error:
        raise ConfigError(f"{plan.key}: {error}") from error
    except (TypeError, ValueError, OverflowError, OSError, MemoryError) as error:
        raise ConfigError(f"{plan.key} cannot be made: {type(error).__name__}: {error}") from error
    except (KeyboardInterrupt, SageLLMError):
        raise
    except BaseException as error:
        raise plugin_failure(plan.label, "its factory", error) from error
