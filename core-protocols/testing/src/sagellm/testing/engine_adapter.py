"""What every engine adapter must do. Subclass `EngineAdapterContract` and override `make`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.engine_adapter import EngineAdapterProtocol, EngineCommand

KIT_SETTINGS: dict[str, Any] = {
    "kv.block_size": 64,
    "kv.dtype": ("float8_e4m3fn", "int8"),
    "kv.memory_fraction": 0.5,
    "kv.num_blocks": 512,
    "kv.tiers": {"host": 1 << 30},
    "model.dtype": "bfloat16",
    "model.max_model_len": 4096,
    "model.revision": "main",
    "prefix_cache.enabled": True,
    "prefix_cache.eviction_policy": "reuse",
    "scheduler.chunk": "chunked-prefill",
    "scheduler.max_num_batched_tokens": 1024,
    "scheduler.max_num_seqs": 8,
    "scheduler.order": "shortest",
    "scheduler.passes": ["tenant-limits"],
    "scheduler.preempt": "memory-aware",
    "scheduler.share": "fair-share",
    "scheduler.step_target_ms": 50.0,
    "server.host": "127.0.0.1",
    "server.port": 8100,
}
"""A value for each setting that an adapter may know; of several, it takes one."""

NEEDED = {
    "prefix_cache.eviction_policy": ("kv.tiers",),
    "scheduler.step_target_ms": ("scheduler.chunk",),
}
"""Settings without which another one may make no sense."""

UNKNOWN = "model.seed_of_the_kit"


class EngineAdapterContract:
    """The contract of EngineAdapterProtocol as tests."""

    def make(self) -> EngineAdapterProtocol:
        """Return a new adapter."""
        raise NotImplementedError

    def test_it_says_which_engine_it_is_about(self) -> None:
        """A name, with a version where there is one."""
        assert self.make().engine.strip()

    def test_every_setting_that_it_knows_changes_the_command(self) -> None:
        """A value that is not the engine's own shows, and the command is the same each time."""
        adapter = self.make()
        bare = adapter.export("MODEL", {})
        assert isinstance(bare, EngineCommand)
        assert adapter.knobs() or not bare.arguments, "it exports nothing, and starts something"
        for key, theirs in adapter.knobs().items():
            assert theirs.strip(), f"{key} has no name there"
            needed = _needed(adapter, key)
            settings = needed | {key: _value(adapter, key)}
            found = adapter.export("MODEL", settings)
            assert found == self.make().export("MODEL", settings)
            assert found != adapter.export("MODEL", needed), f"{key} changes nothing"
            assert "MODEL" in found.arguments

    def test_a_command_is_text(self) -> None:
        """For a shell, and as arguments."""
        adapter = self.make()
        for key in adapter.knobs():
            found = adapter.export("MODEL", {key: _value(adapter, key), **_needed(adapter, key)})
            parts = (*found.arguments, *found.environment, *found.environment.values())
            assert all(isinstance(each, str) and each for each in parts)
            assert all(each.split("=")[0] in found.text for each in found.environment)

    def test_what_the_engine_has_not_is_refused_by_name(self) -> None:
        """With the setting and the reason; an unknown one with those that are known."""
        adapter = self.make()
        assert not adapter.knobs().keys() & adapter.refusals().keys()
        for key, why in {**adapter.refusals(), UNKNOWN: ""}.items():
            with pytest.raises(ConfigError) as refused:
                adapter.export("MODEL", {key: KIT_SETTINGS.get(key, 1)})
            assert key in str(refused.value)
            assert why in str(refused.value)


def _value(adapter: EngineAdapterProtocol, key: str) -> Any:
    value = KIT_SETTINGS[key]
    if not isinstance(value, tuple):
        return value
    for each in value[:-1]:
        with suppress(ConfigError):
            adapter.export("MODEL", {key: each})
            return each
    return value[-1]


def _needed(adapter: EngineAdapterProtocol, key: str) -> dict[str, Any]:
    return {each: KIT_SETTINGS[each] for each in NEEDED.get(key, ()) if each in adapter.knobs()}
