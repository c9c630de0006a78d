"""Builds KV storage below the device, as named by a configuration: tiers, and saves of the prefix cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from sagellm.core import (
    ConfigError,
    KVMemory,
    KVOffloadProtocol,
    KVSavesProtocol,
    KVSpace,
    KVTierProtocol,
    PluginError,
    ProviderSpec,
    Runtime,
    SaveStore,
)
from sagellm.core.store_key import StoreKey
from sagellm.engines.modules import Modules
from sagellm.engines.sizes import parse_bytes

_OFFLOAD, _SAVES = "tiered", "file"
"""The providers of the kinds `kv_offload` and `kv_saves`."""


def read_tiers(modules: Modules) -> list[ProviderSpec]:
    """Return the tiers of `kv.tiers`, except those with zero bytes, which are disabled.

    Raises ConfigError for an unreadable `kv.store_key`.
    """
    _store_key(modules)
    return [spec for spec in modules.config.kv.tiers if spec.options["max_bytes"]]


def build_offload(modules: Modules, memory: KVMemory, runtime: Runtime) -> KVOffloadProtocol | None:
    """Build the tiers of `kv.tiers` and what offloads evicted KV to them; None if there are none.

    Raises ConfigError as `read_tiers` does, and if a tier cannot be built from its options.
    """
    specs = read_tiers(modules)
    if not specs:
        return None
    with ExitStack() as closing:
        tiers = {}
        for spec in specs:
            tiers[spec.name] = _make_tier(modules, spec, runtime)
            closing.callback(tiers[spec.name].close)
        rule, clock = modules.config.kv.fetch, runtime.clock
        made = modules.make("kv_offload", _OFFLOAD, memory, tiers=tiers, rule=rule, clock=clock)
        closing.pop_all()
    return cast(KVOffloadProtocol, made)


def build_saves(
    modules: Modules, memory: KVMemory, space: KVSpace, fingerprint: Callable[[], str], runtime: Runtime
) -> KVSavesProtocol:
    """Build what saves and loads the prefix cache, in files of the `file` tier."""
    settings = modules.config.kv
    folder = Path(settings.save_folder) if settings.save_folder else _default_save_folder()

    def open_tier(max_bytes: int, name: str) -> KVTierProtocol:
        options = {"max_bytes": max_bytes, "folder": str(folder), "name": name}
        return _make_tier(modules, ProviderSpec("file", options), runtime)

    store = SaveStore(folder, parse_bytes(settings.max_saved, "kv.max_saved"), open_tier)
    made = modules.make(
        "kv_saves", _SAVES, memory, space, store=store, fingerprint=fingerprint, runtime=runtime
    )
    return cast(KVSavesProtocol, made)


def _default_save_folder() -> Path:
    """Return the folder for saves among the user's data."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "sagellm" / "kv"


def _store_key(modules: Modules) -> StoreKey | None:
    """Read the configured key; None lets each tier use its default."""
    source = modules.config.kv.store_key
    return None if source is None else StoreKey.named(source)


def _make_tier(modules: Modules, spec: ProviderSpec, runtime: Runtime) -> KVTierProtocol:
    try:
        made: KVTierProtocol = modules.make("kv_tier", spec, runtime=runtime, store_key=_store_key(modules))
    except PluginError as error:
        if isinstance(error.__cause__, TypeError | ValueError | OverflowError | OSError):
            raise ConfigError(f"kv.tiers: {error}") from error
        raise
    except MemoryError as error:
        raise ConfigError(f"kv.tiers: {spec.name!r} cannot be made: MemoryError: {error}") from error
    return made
