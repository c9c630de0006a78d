"""A plugin that ends the process, clashes or lies stops only what names it."""

from __future__ import annotations

import logging
import re

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
from sagellm.core.protocols.checkpoint_format import NullCheckpointFormat
from sagellm.core.protocols.kv_tier import NullKVTier
from sagellm.engines import EngineConfig
from sagellm.engines.config.schema import flat_to_dotted
from sagellm.engines.loading.format_and_family import (
    installed_families,
    installed_formats,
    select_family,
)
from sagellm.engines.machine import read_topology
from sagellm.lab.traces.read import read_trace

NULL = "sagellm.core.protocols.eviction:NullEvictionPolicy"
NULL_FORMAT = "sagellm.core.protocols.checkpoint_format:NullCheckpointFormat"


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
    "executor": {"executor": "exit"},
    "forward_backend": {"forward_backend": "exit"},
    "quantizer": {"quantization": "exit"},
    "sparsifier": {"sparsity": "exit"},
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
        return [Provider(kind, "exit", NULL, "") for kind in self.kinds]


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
    from sagellm.core.protocols.logits_processor import NullLogitsProcessor

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


class Quits(BaseException):
    """What neither `except Exception` nor Python's own exit knows."""


WHERE = r"acme 3 \(test_hostile_plugins\.py, line \d+, in quit\): "
CALLS_IN_STEPS = {
    ("kv_allocator", "allocate"): rf"{WHERE}Quits: gone",
    ("kv_pool", "allocate"): rf"{WHERE}Quits: gone",
    ("prefix_cache", "match_prefix"): rf"{WHERE}Quits: gone",
    ("prefix_cache", "insert_prefix"): rf"{WHERE}Quits: gone",
    ("scheduler", "schedule"): rf"{WHERE}Quits: gone",
    ("executor", "submit"): rf"{WHERE}Quits: gone",
    ("executor", "collect"): rf"{WHERE}Quits: gone",
    ("forward_backend", "forward"): rf"{WHERE}Quits: gone",
    ("attention_backend", "forward"): rf"{WHERE}Quits: gone",
    ("logits_processor", "apply"): r"logits_processor 'null' of acme 3: apply\(\) failed; Quits: gone",
}
"""How requests end whose step a module ends, by kind and method."""

LOGGED = {
    (
        "scheduler_pass",
        "run",
    ): rf"scheduler_pass 'null' of acme 3 failed and is removed .*: {WHERE}Quits: gone",
    ("scheduler_pass", "observe"): rf"scheduler_pass 'null' of acme 3 .* removed .*: {WHERE}Quits: gone",
    ("eviction_policy", "on_insert"): "eviction policy .*Acme failed",
    ("lifetime_predictor", "predict"): rf"the lifetime predictor failed, 1 times so far: {WHERE}Quits: gone",
    ("lifetime_predictor", "update"): rf"the lifetime predictor failed, 1 times so far: {WHERE}Quits: gone",
}
"""What is logged where requests go on without the module."""

BASES = {
    "forward_backend": "torch",
    "scheduler_pass": "null",
    "logits_processor": "null",
    "kv_pool": "paged",
    "kv_allocator": "free_list",
}
SETTINGS = KINDS_AND_SETTINGS | {"kv_pool": {"kv_pool": "exit"}}


def engine_with(make_engine, monkeypatch, kind: str, method: str, error: BaseException):
    """Return an engine whose module of a kind is ours but for a method, and the switch that has it raise."""
    switch = {"is_on": False}
    registry = PluginRegistry.load()
    ((setting, value),) = SETTINGS[kind].items()
    name = f"acme:{BASES.get(kind) or default_of(setting)}"
    base = registry.resolve(kind, name.removeprefix("acme:"))
    honest = getattr(base, method)

    def quit(self, *args, **options):
        if switch["is_on"]:
            raise error
        return honest(self, *args, **options)

    made = type("Acme", (base,), {method: quit, "__module__": __name__})
    if kind == "logits_processor":
        made.start = lambda self, request: ()

    class Offers:
        @hookimpl
        def sagellm_providers(self) -> list[Provider]:
            return [Provider(kind, name.removeprefix("acme:"), NULL, "")]

    registry.register(Offers(), distribution="acme", version="3")
    resolve = registry.resolve
    monkeypatch.setattr(registry, "resolve", lambda k, n: made if (k, n) == (kind, name) else resolve(k, n))
    chosen = [name] if isinstance(value, list) else name
    return make_engine(registry=registry, **{setting: chosen}), switch


def default_of(setting: str) -> str:
    return EngineConfig().values()[flat_to_dotted({setting: ""}).popitem()[0]]


@pytest.mark.parametrize(("kind", "method"), CALLS_IN_STEPS)
def test_a_module_that_quits_in_a_step_ends_requests_and_not_the_program(
    make_engine, all_blocks_are_back, monkeypatch, kind, method
):
    engine, switch = engine_with(make_engine, monkeypatch, kind, method, Quits("gone"))
    with engine:
        switch["is_on"] = True
        (output,) = engine.generate([[5, 6, 7] * 9])
        assert output.outputs[0].finish_reason == "error"
        assert re.search(CALLS_IN_STEPS[kind, method], output.outputs[0].error)
        switch["is_on"] = False
        assert all_blocks_are_back(engine)
        assert engine.generate([[5, 6, 7] * 9])[0].outputs[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(("kind", "method"), LOGGED)
def test_requests_go_on_without_a_module_that_quits_and_only_advises(
    make_engine, all_blocks_are_back, monkeypatch, caplog, kind, method
):
    engine, switch = engine_with(make_engine, monkeypatch, kind, method, Quits("gone"))
    with engine:
        expected = engine.generate([[8, 9] * 9])[0].outputs[0].token_ids
        switch["is_on"] = True
        assert engine.generate([[8, 9] * 9])[0].outputs[0].token_ids == expected
        assert engine.generate([[5, 6, 7] * 9])[0].outputs[0].finish_reason in ("length", "stop")
        assert re.search(LOGGED[kind, method], caplog.text)
        assert all_blocks_are_back(engine)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("kv_allocator", "allocate"),  # fails a step
        ("scheduler_pass", "run"),
        ("executor", "submit"),
        ("executor", "collect"),
        ("forward_backend", "forward"),  # fails a request
        ("eviction_policy", "on_insert"),  # fails nothing
        ("lifetime_predictor", "predict"),
    ],
)
def test_ctrl_c_inside_a_module_stays_ctrl_c(make_engine, monkeypatch, kind, method):
    engine, switch = engine_with(make_engine, monkeypatch, kind, method, KeyboardInterrupt())
    switch["is_on"] = True
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5, 6, 7] * 9])
    assert not engine.driver.live_requests
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("kind", "untold"), [("kv_allocator", "kv_pool"), ("eviction_policy", "eviction_policy")]
)
def test_metrics_go_on_without_a_module_that_quits(make_engine, monkeypatch, caplog, kind, untold):
    engine, switch = engine_with(make_engine, monkeypatch, kind, "metrics", Quits("gone"))
    told = engine.metrics().modules.keys()
    switch["is_on"] = True
    assert engine.metrics().modules.keys() == told - {untold}
    assert re.search(f"metrics of {untold} failed, 1 times so far: {WHERE}Quits: gone", caplog.text)


@pytest.mark.parametrize("method", ["submit", "poll", "contains", "stored", "metrics"])
def test_a_tier_that_quits_costs_no_request(make_engine, all_blocks_are_back, monkeypatch, caplog, method):
    def quit(self, *args):
        raise Quits("gone")

    registry = registry_with(monkeypatch, "kv_tier")
    broken = type("Broken", (NullKVTier,), {method: quit})
    resolve = registry.resolve
    monkeypatch.setattr(registry, "resolve", lambda k, n: broken if "exit" in n else resolve(k, n))
    tight = {"num_blocks": 12, "block_size": 4}
    prompts = [[5, 6, 7] * 6, [9, 10] * 9, [5, 6, 7] * 6]
    expected = [make_engine(**tight).generate([each])[0].outputs[0].token_ids for each in prompts]
    with make_engine(registry=registry, kv_tiers={"exit": {"max_bytes": 1 << 20}}, **tight) as engine:
        found = [engine.generate([each])[0].outputs[0].token_ids for each in prompts]
        assert engine.metrics().modules["kv_tier"].tiers.num_failed > 0
        assert found == expected
        assert all_blocks_are_back(engine)
    assert caplog.messages.count("the KV tier 'exit' failed and is no longer used") == 1


def test_a_predictor_that_always_fails_is_logged_ever_more_rarely(make_engine, monkeypatch, caplog):
    engine, switch = engine_with(make_engine, monkeypatch, "lifetime_predictor", "predict", Quits("gone"))
    switch["is_on"] = True
    with engine:
        for _ in range(9):
            engine.generate([[5, 6, 7]])
    counts = re.findall(r"the lifetime predictor failed, (\d+) times so far", caplog.text)
    assert counts == ["1", "2", "4", "8"]


def test_a_tier_whose_factory_ends_the_process_is_named(make_engine, monkeypatch):
    registry = registry_with(monkeypatch, "kv_tier")
    with pytest.raises(PluginError, match=r"kv_tier 'exit' of acme 3: its factory failed; SystemExit: 7"):
        make_engine(registry=registry, kv_tiers={"exit": {"max_bytes": "1MiB"}})


def test_a_checkpoint_format_with_an_option_that_nothing_can_set_is_left_out(monkeypatch, caplog):
    class Demanding(NullCheckpointFormat):
        def __init__(self, phase):
            pass

    class Offer:
        @hookimpl
        def sagellm_providers(self):
            return [
                Provider(
                    "checkpoint_format",
                    "moon",
                    NULL_FORMAT,
                    "",
                )
            ]

    registry = PluginRegistry.load()
    registry.register(Offer(), distribution="acme", version="3")
    resolve = registry.resolve
    monkeypatch.setattr(
        registry, "resolve", lambda kind, name: Demanding if "moon" in name else resolve(kind, name)
    )
    with caplog.at_level(logging.WARNING, "sagellm"):
        formats = installed_formats(registry)
    assert "a checkpoint format is left out: checkpoint_format 'acme:moon' needs the option" in caplog.text
    assert len(formats) == len(PluginRegistry.load().providers("checkpoint_format"))
