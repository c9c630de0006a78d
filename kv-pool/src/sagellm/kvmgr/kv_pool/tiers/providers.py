"""The tiers that a configuration can name."""

from __future__ import annotations

import os
from pathlib import Path

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tier import KVTierProtocol
from sagellm.core.runtime import Runtime, VirtualClock
from sagellm.core.store_key import StoreKey
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend, NVMeBackend
from sagellm.kvmgr.kv_pool.tiers.background import BackgroundTier

_MAX_START_S = 1.0
"""How long an engine's start waits for a server's blocks; the rest are found while it runs."""

_SLACK_S = 0.25
"""How much longer than an exchange's own deadline a background thread may take."""


def host_tier(max_bytes: int, *, runtime: Runtime | None = None) -> KVTierProtocol:
    """Make a tier in host memory, which is taken as it fills. Raises ConfigError if too large."""
    runtime = runtime or Runtime.system()
    try:
        backend = DDRBackend(max_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"{max_bytes} bytes of memory cannot be had: {error}") from error
    return BackendTier(backend, clock=runtime.clock)


def file_tier(
    max_bytes: int,
    *,
    runtime: Runtime | None = None,
    store_key: StoreKey | None = None,
    folder: str | None = None,
    name: str | None = None,
    timeout_s: float = 30.0,
) -> KVTierProtocol:
    """Make a tier in a file, by default in the user's cache folder.

    Without a name the file is deleted when the process ends; a named one is persistent, and an engine with
    the same key finds its blocks again. The folder is created with mode 0700; a leading '~' is expanded. A
    background thread reads and writes; operations longer than `timeout_s` fail. Raises ConfigError if the
    file cannot be opened: an existing one must be the user's own, not a link, and is cut to `max_bytes`.
    """
    _check_timeout(timeout_s)
    runtime = runtime or Runtime.system()
    if name is not None and not _is_plain(name):
        raise ConfigError(f"the KV file is called {name!r}; give letters, digits, '-', '_' and '.', no path")
    if folder is not None and not isinstance(folder, str):
        raise ConfigError(f"the folder of the KV file is {folder!r}; give a path")
    where = Path(folder).expanduser() if folder is not None else default_folder()
    number = runtime.randomness.stream(f"kv-file-{os.getpid()}").getrandbits(32)
    path = where / (f"{name}.kv" if name is not None else f"{os.getpid()}-{number:08x}.tmp.kv")
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        backend = NVMeBackend(str(path), max_bytes, files=runtime.files, is_persistent=name is not None)
        tier = BackendTier(backend, store_key=store_key, clock=runtime.clock)
        tier.recover()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the KV file {path.name} in {where} cannot be opened: {reason}") from error
    return _in_background(tier, runtime, timeout_s)


def redis_tier(
    max_bytes: int,
    *,
    runtime: Runtime | None = None,
    store_key: StoreKey | None = None,
    url: str = "redis://127.0.0.1:6379/0",
    prefix: str = "sagellm",
    timeout_s: float = 1.0,
) -> KVTierProtocol:
    """Make a tier in a Redis or Valkey server; waits for it at most `timeout_s`, and at most one second.

    A background thread talks to it; each exchange must end within `timeout_s`. Raises ConfigError for invalid
    options; no message shows the URL, which may hold a password.
    """
    from sagellm.kvmgr.kv_pool.tiers.redis import RedisTier

    if not isinstance(prefix, str) or not prefix:
        raise ConfigError(f"prefix is {prefix!r}; it must be the text that all keys start with")
    _check_timeout(timeout_s)
    runtime = runtime or Runtime.system()
    try:
        tier = RedisTier(
            max_bytes, url=url, prefix=prefix, timeout_s=timeout_s, store_key=store_key, clock=runtime.clock
        )
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            "url is not a Redis URL; give redis://HOST:PORT/DB, rediss:// or unix://PATH"
        ) from None
    background = BackgroundTier(
        tier, timeout_s=timeout_s + _SLACK_S, search=tier.search, clock=runtime.clock, label=tier.label
    )
    background.wait_for_search(min(timeout_s, _MAX_START_S))
    return background


def default_folder() -> Path:
    """Return the folder for KV files in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sagellm" / "kv"


def _in_background(tier: BackendTier, runtime: Runtime, timeout_s: float) -> KVTierProtocol:
    """Run a tier on a thread, except on virtual time, where everything runs on one thread."""
    if isinstance(runtime.clock, VirtualClock):
        return tier
    return BackgroundTier(tier, timeout_s=timeout_s, clock=runtime.clock, label=tier.backend.label)


def _check_timeout(timeout_s: object) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= 3600:
        raise ConfigError(f"timeout_s is {timeout_s!r}; it must be above 0 and at most 3600 seconds")


def _is_plain(name: str) -> bool:
    return (
        isinstance(name, str)
        and name[:1] not in ("", ".")
        and all(each.isalnum() or each in "-_." for each in name)
    )
