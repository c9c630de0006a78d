"""Makes the tiers below the device as a configuration names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sagellm.core import ConfigError, ForwardBackendProtocol, KVIdentity, KVLayout, Runtime
from sagellm.engines.core.kv_offload import KVOffload
from sagellm.engines.modules import Modules
from sagellm.engines.sizes import parse_bytes


class KVMemory(NamedTuple):
    """The KV of the device: who holds it, how it lies there, and whose it is."""

    backend: ForwardBackendProtocol
    layout: KVLayout
    identity: KVIdentity


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


def _make_tier(modules: Modules, name: str, given: Any, runtime: Runtime) -> Any:
    key = f"kv.tiers.{name}"
    options = dict(given) if isinstance(given, Mapping) else {"max_bytes": given}
    max_bytes = parse_bytes(options.pop("max_bytes", None), key)
    try:
        return modules.factory("kv_tier", name)(max_bytes, runtime=runtime, **options)
    except TypeError as error:
        raise ConfigError(f"{key} is {given!r}: {error}") from error
