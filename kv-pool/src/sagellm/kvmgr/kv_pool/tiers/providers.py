"""The tiers that a configuration can name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tier import KVTierProtocol
from sagellm.core.runtime import Runtime
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend, NVMeBackend
from sagellm.kvmgr.kv_pool.tiers.classifier import HotColdClassifier
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage


def host_tier(max_bytes: int, *, runtime: Runtime | None = None) -> KVTierProtocol:
    """Make a tier in host memory, which is taken as it fills."""
    runtime = runtime or Runtime.system()
    return BackendTier(DDRBackend(max_bytes), clock=runtime.clock)


def file_tier(
    max_bytes: int, *, runtime: Runtime | None = None, folder: str | None = None, name: str | None = None
) -> KVTierProtocol:
    """Make a tier in a file of a folder, by default of the user's cache folder.

    Without a name the file is deleted at the end; with one it stays, and its blocks are found again. The
    folder is made, mode 0700. Raises ConfigError if the file cannot be had.
    """
    runtime = runtime or Runtime.system()
    if name is not None and not _is_plain(name):
        raise ConfigError(f"the KV file is called {name!r}; give letters, digits, '-', '_' and '.', no path")
    where = Path(folder) if folder is not None else default_folder()
    number = runtime.randomness.stream(f"kv-file-{os.getpid()}").getrandbits(32)
    path = where / (f"{name}.kv" if name is not None else f"{os.getpid()}-{number:08x}.tmp.kv")
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        backend = NVMeBackend(str(path), max_bytes, files=runtime.files, is_persistent=name is not None)
    except OSError as error:
        raise ConfigError(f"the KV file in kv.tiers cannot be opened: {error.strerror}") from error
    tier = BackendTier(backend, clock=runtime.clock)
    tier.recover()
    return tier


def redis_tier(
    max_bytes: int,
    *,
    runtime: Runtime | None = None,
    url: str = "redis://127.0.0.1:6379/0",
    prefix: str = "sagellm",
    timeout_s: float = 1.0,
) -> KVTierProtocol:
    """Make a tier in a server. Raises ConfigError if the package redis is not installed."""
    from sagellm.kvmgr.kv_pool.tiers.redis import RedisTier

    runtime = runtime or Runtime.system()
    return RedisTier(max_bytes, url=url, prefix=prefix, timeout_s=timeout_s, clock=runtime.clock)


def tiered(
    max_bytes: int = 0,
    *,
    runtime: Runtime | None = None,
    tiers: Mapping[str, KVTierProtocol] | None = None,
    **thresholds: float,
) -> KVTierProtocol:
    """Join tiers, the fastest first; `thresholds` are the classifier's. Raises ConfigError for no tiers."""
    del max_bytes  # each tier has its own
    runtime = runtime or Runtime.system()
    classifier = HotColdClassifier(**thresholds)  # type: ignore[arg-type]
    return TieredKVStorage(tiers or {}, classifier=classifier, clock=runtime.clock)


def default_folder() -> Path:
    """Return the folder for KV files in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sagellm" / "kv"


def _is_plain(name: str) -> bool:
    return bool(name) and name[0] != "." and all(each.isalnum() or each in "-_." for each in name)
