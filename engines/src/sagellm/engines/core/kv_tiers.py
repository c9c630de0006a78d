"""Makes the tiers below the device as a configuration names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sagellm.core import ConfigError, KVTierProtocol, Runtime
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.kv_memory import KVMemory
from sagellm.engines.core.kv_offload import KVOffload
from sagellm.engines.core.kv_saves import KVSaves
from sagellm.engines.core.save_folder import SaveFolder, default_save_folder
from sagellm.engines.modules import Modules
from sagellm.engines.sizes import parse_bytes


def build_offload(modules: Modules, memory: KVMemory, runtime: Runtime) -> KVOffload | None:
    """Make the tiers of `kv.tiers` and join them; None if there are none.

    Raises ConfigError for sizes that are none and options that a tier does not take.
    """
    kv = modules.config.kv
    if not kv.tiers:
        return None
    tiers = {name: _make_tier(modules, name, given, runtime) for name, given in kv.tiers.items()}
    return KVOffload(
        modules.make("kv_tier", "tiered", 0, runtime=runtime, tiers=tiers),
        memory.backend,
        memory.identity,
        block_size=memory.layout.block_size,
        block_bytes=memory.layout.block_bytes,
        rule=kv.fetch,
    )


def build_saves(
    modules: Modules, memory: KVMemory, kv: KVCacheManager, fingerprint: Callable[[], str], runtime: Runtime
) -> KVSaves:
    """Make what saves and loads the prefix cache, in files of the tier `file`."""
    settings = modules.config.kv
    folder = Path(settings.save_folder) if settings.save_folder else default_save_folder()

    def open_tier(max_bytes: int, name: str) -> KVTierProtocol:
        factory = modules.factory("kv_tier", "file")
        tier: KVTierProtocol = factory(max_bytes, runtime=runtime, folder=str(folder), name=name)
        return tier

    saves = SaveFolder(folder, runtime.files, parse_bytes(settings.max_saved, "kv.max_saved"))
    return KVSaves(kv, memory, saves, open_tier, fingerprint)


def _make_tier(modules: Modules, name: str, given: Any, runtime: Runtime) -> Any:
    key = f"kv.tiers.{name}"
    options = dict(given) if isinstance(given, Mapping) else {"max_bytes": given}
    max_bytes = parse_bytes(options.pop("max_bytes", None), key)
    try:
        return modules.factory("kv_tier", name)(max_bytes, runtime=runtime, **options)
    except TypeError as error:
        raise ConfigError(f"{key} is {given!r}: {error}") from error
