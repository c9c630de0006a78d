"""A plugin that ends the process, clashes or lies stops only what names it."""

from __future__ import annotations

import logging

import pytest

from sagellm.core import (
    EvictionPolicyProtocol,
    PluginError,
    PluginRegistry,
    Provider,
    UnknownProviderError,
    UnsupportedModelError,
    hookimpl,
)
from sagellm.engines.loading.families import installed_families, select_family
from sagellm.engines.machine import read_topology
from sagellm.engines.traces.read import read_trace

KINDS_AND_SETTINGS = {
    "engine": {"engine_kind": "exit"},
    "eviction_policy": {"eviction_policy": "exit"},
    "prefix_cache": {"prefix_cache": "exit"},
    "kv_allocator": {"kv_allocator": "exit"},
    "scheduler": {"scheduler": "exit"},
    "scheduler_pass": {"scheduler_passes": ["exit"]},
    "lifetime_predictor": {"lifetime_predictor": "exit"},
    "logits_processor": {"logits_processors": ["exit"]},
    "attention_backend": {"attention_backend": "exit"},
    "forward_backend": {"forward_backend": "exit"},
    "quantizer": {"quantization": "exit"},
}


class Exit:
    def __init__(self, *args, **options):
        raise SystemExit(7)


class Exits:
    """Provides, under the name `exit`, what ends the process when it is made."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    @hookimpl
    def sagellm_providers(self) -> list[Provider]:
        return [Provider(kind, "exit", "sagellm.core:NullEvictionPolicy", "") for kind in self.kinds]


def registry_with(monkeypatch, *kinds: str) -> PluginRegistry:
    registry = PluginRegistry.load()
    registry.register(Exits(*kinds), distribution="acme", version="3")
    resolve = registry.resolve
    monkeypatch.setattr(
        registry, "resolve", lambda kind, name: Exit if "exit" in name else resolve(kind, name)
    )
    return registry


@pytest.mark.parametrize("kind", KINDS_AND_SETTINGS)
def test_a_factory_that_exits_is_an_error_that_names_its_distribution(make_engine, monkeypatch, kind):
    registry = registry_with(monkeypatch, kind)
    with pytest.raises(PluginError, match=rf"{kind} 'exit' of acme 3: its factory failed; SystemExit: 7"):
        make_engine(registry=registry, **KINDS_AND_SETTINGS[kind])
    make_engine(registry=registry).close()


def test_model_families_that_fail_are_left_out(monkeypatch, caplog):
    registry = registry_with(monkeypatch, "model_family")
    with caplog.at_level(logging.WARNING, "sagellm"):
        families = installed_families(registry)
    assert "model_family 'exit' of acme 3: its factory failed; SystemExit: 7" in caplog.text
    assert len(families) == len(PluginRegistry.load().providers("model_family"))


def test_a_model_family_that_exits_is_skipped(make_engine):
    class Ends:
        is_fallback = False

        def accepts(self, config):
            raise SystemExit(8)

    families = installed_families(PluginRegistry.load())
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert type(select_family(config, [Ends(), *families]).family).__name__ == "Qwen3Family"
    with pytest.raises(UnsupportedModelError, match=r"model_family Ends: accepts\(\) failed; SystemExit: 8"):
        select_family(config, [Ends()])


def test_a_topology_reader_and_a_trace_reader_are_named(monkeypatch, tmp_path, caplog):
    registry = registry_with(monkeypatch, "topology", "trace_reader")
    with pytest.raises(PluginError, match="topology 'exit' of acme 3: its factory failed; SystemExit: 7"):
        read_topology(registry, "exit")
    monkeypatch.setattr(PluginRegistry, "load", lambda: registry)
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [0]}\n')
    assert len(read_trace(path)) == 1
    assert "trace_reader 'exit' of acme 3: its factory failed; SystemExit: 7" in caplog.text
    with pytest.raises(PluginError, match="trace_reader 'exit' of acme 3"):
        read_trace(path, name="exit")


def test_an_engine_starts_beside_broken_plugins_and_warns(make_engine, monkeypatch, caplog):
    registry = PluginRegistry.load()
    registry.plugins.append(
        type(registry.plugins[0])("acme", "3", "acme.plugin", PluginError("acme ends the process"))
    )
    with caplog.at_level(logging.WARNING, "sagellm"):
        make_engine(registry=registry).close()
    assert "the plugin acme 3: acme ends the process" in caplog.text
    with pytest.raises(UnknownProviderError, match="acme could not be loaded: acme ends the process"):
        make_engine(registry=registry, eviction_policy="moon")


def test_an_observer_that_exits_stops_nothing(make_engine):
    class Observer:
        @hookimpl
        def sagellm_step_finished(self, record):
            raise SystemExit(9)

    registry = PluginRegistry.load()
    registry.register(Observer(), distribution="acme")
    with make_engine(registry=registry) as engine:
        (output,) = engine.generate([[5, 6, 7]])
    assert output.outputs[0].finish_reason in ("length", "stop")


def test_a_logits_processor_that_exits_ends_only_its_request(make_engine, monkeypatch):
    from sagellm.core import NullLogitsProcessor

    class Ends(NullLogitsProcessor):
        def start(self, request):
            raise SystemExit(10)

    registry = registry_with(monkeypatch, "logits_processor")
    resolve = registry.resolve
    monkeypatch.setattr(
        registry, "resolve", lambda kind, name: Ends if name == "exit" else resolve(kind, name)
    )
    with make_engine(registry=registry, logits_processors=["exit"]) as engine:
        (output,) = engine.generate([[5, 6, 7]])
    assert output.outputs[0].finish_reason == "error"
    assert "logits_processor 'exit' of acme 3: start() failed; SystemExit: 10" in output.outputs[0].error


def test_a_plugin_of_the_same_name_does_not_replace_the_default_policy(make_engine):
    class Imitator:
        @hookimpl
        def sagellm_providers(self) -> list[Provider]:
            return [Provider("eviction_policy", "lru", "no_such_module:LRU", "")]

    registry = PluginRegistry.load()
    registry.register(Imitator(), distribution="acme")
    make_engine(registry=registry, eviction_policy="lru").close()
    assert issubclass(registry.resolve("eviction_policy", "lru"), EvictionPolicyProtocol)  # type: ignore[arg-type]
