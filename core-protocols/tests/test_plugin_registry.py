"""What an engine says of plugins that are missing, doubled, broken or written for another core.

The distributions here are real ones on disk, found by importlib.metadata.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sagellm.core import (
    DuplicateProviderError,
    PluginError,
    PluginHookError,
    PluginImportError,
    PluginMethodError,
    PluginRegistry,
    PluginVersionError,
    Provider,
    UnknownKindError,
    UnknownProviderError,
    hookimpl,
)
from sagellm.core.protocols.eviction import NullEvictionPolicy

Install = Callable[..., str]
NULL = "sagellm.core.protocols.eviction:NullEvictionPolicy"

GOOD = """
from sagellm.core import Provider, hookimpl

@hookimpl
def sagellm_providers():
    return [Provider({kind!r}, {name!r}, {target!r}, "for a test")]
"""

HOOK = "from sagellm.core import hookimpl\n@hookimpl\n"


def good(
    name: str = "mru",
    *,
    kind: str = "eviction_policy",
    target: str = NULL,
) -> str:
    return GOOD.format(kind=kind, name=name, target=target)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one plugin module on the path and return its module's name."""
    modules: list[str] = []

    def put(distribution: str, source: str = "", *, version: str = "1.2", entry: str | None = None) -> str:
        module = f"{distribution.lower().replace('-', '_')}_plugin"
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[sagellm]\nplugin = {entry or module}\n")
        (tmp_path / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        modules.append(module)
        return module

    monkeypatch.syspath_prepend(str(tmp_path))
    yield put
    for module in modules:
        sys.modules.pop(module, None)


def error_of(registry: PluginRegistry, distribution: str) -> PluginError | None:
    (plugin,) = [entry for entry in registry.plugins if entry.distribution == distribution]
    return plugin.error


def test_an_installed_distribution_is_found_and_its_target_is_imported_when_asked_for(
    install: Install,
) -> None:
    module = install("acme-mru", good() + "\nprint", version="3.1")
    registry = PluginRegistry.load()
    found = registry.find("eviction_policy", "mru")
    assert (found.distribution, found.version, found.qualified_name) == ("acme-mru", "3.1", "acme-mru:mru")
    assert registry.resolve("eviction_policy", "mru") is NullEvictionPolicy
    (plugin,) = [plugin for plugin in registry.plugins if plugin.distribution == "acme-mru"]
    assert (plugin.version, plugin.entry_point, plugin.error) == ("3.1", module, None)
    registry.require_healthy()


def test_the_nulls_of_core_are_providers_like_any_other() -> None:
    registry = PluginRegistry.load()
    assert registry.find("eviction_policy", "null").distribution == "sagellm-core-protocols"
    for entry in registry.providers():
        if entry.distribution == "sagellm-core-protocols":
            assert callable(registry.resolve(entry.provider.kind, entry.qualified_name))
            assert entry.provider.summary


def test_providers_are_listed_by_kind_and_name(install: Install) -> None:
    install("acme-mru", good())
    registry = PluginRegistry.load()
    listed = [(entry.provider.kind, entry.provider.name) for entry in registry.providers()]
    assert listed == sorted(listed)
    assert ("eviction_policy", "mru") in listed
    assert {entry.provider.kind for entry in registry.providers("eviction_policy")} == {"eviction_policy"}


def test_an_unknown_name_lists_what_is_installed_and_the_nearest(install: Install) -> None:
    install("acme-mru", good("freshest"))
    with pytest.raises(UnknownProviderError) as caught:
        PluginRegistry.load().find("eviction_policy", "freshets")
    assert "no installed eviction_policy is called 'freshets'; installed: " in str(caught.value)
    assert "freshest" in str(caught.value)
    assert "null" in str(caught.value)
    assert str(caught.value).endswith("Did you mean 'freshest'?")


def test_an_unknown_qualified_name_lists_qualified_names(install: Install) -> None:
    install("acme-mru", good())
    with pytest.raises(
        UnknownProviderError, match=r"installed: .*acme-mru:mru.* Did you mean 'acme-mru:mru'"
    ):
        PluginRegistry.load().find("eviction_policy", "acme-lru:mru")


def test_an_unknown_name_mentions_plugins_that_could_not_be_loaded(install: Install) -> None:
    install("acme-broken", "import a_module_that_is_not_there")
    with pytest.raises(
        UnknownProviderError, match=r"acme-broken could not be loaded: .*a_module_that_is_not"
    ):
        PluginRegistry.load().find("eviction_policy", "mru")


def test_a_kind_that_nothing_provides_is_no_lookup_failure_of_ours() -> None:
    with pytest.raises(UnknownProviderError, match="no installed quantizer is called 'x'; installed: none"):
        PluginRegistry().find("quantizer", "x")


def test_a_name_that_two_distributions_provide_must_be_qualified(install: Install) -> None:
    install("acme-mru", good())
    install("other_mru", good(target="sagellm.core:EvictionMetrics"))
    registry = PluginRegistry.load()
    with pytest.raises(DuplicateProviderError) as caught:
        registry.find("eviction_policy", "mru")
    assert "acme-mru:mru (sagellm.core.protocols.eviction:NullEvictionPolicy)" in str(caught.value)
    assert "other-mru:mru (sagellm.core:EvictionMetrics)" in str(caught.value)
    assert "name one of them as 'acme-mru:mru'" in str(caught.value)
    assert registry.find("eviction_policy", "other-mru:mru").distribution == "other-mru"
    assert registry.find("eviction_policy", "Other_MRU:mru").distribution == "other-mru"
    registry.require_healthy()


def test_a_distribution_that_provides_a_name_twice_is_refused(install: Install) -> None:
    install("acme-mru", good().replace("return [", "return 2 * ["))
    with pytest.raises(DuplicateProviderError, match="acme-mru provides the eviction_policy 'mru' twice"):
        PluginRegistry.load().require_healthy()


def test_asking_for_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(
        UnknownKindError, match=r"unknown kind 'evicton_policy'.*Did you mean 'eviction_policy'"
    ):
        PluginRegistry.load().find("evicton_policy", "lru")


def test_providing_an_unknown_kind_names_the_distribution_and_the_nearest(install: Install) -> None:
    install("acme-mru", good(kind="evict_policy"))
    error = error_of(PluginRegistry.load(), "acme-mru")
    assert isinstance(error, UnknownKindError)
    assert "acme-mru provides 'mru' of the unknown kind 'evict_policy'" in str(error)
    assert "Did you mean 'eviction_policy'?" in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "import a_module_that_is_not_there",
        "1 / 0",
        "def broken(:",
        "raise SystemExit('a_module')",
        "raise GeneratorExit",
        "class Mute(BaseException):\n    def __str__(self): raise SystemExit\nraise Mute",
    ],
    ids=["missing module", "exception", "syntax", "exit", "another exit", "no message"],
)
def test_a_plugin_that_does_not_import_is_listed_with_its_error(install: Install, source: str) -> None:
    module = install("acme-broken", source)
    install("acme-mru", good())
    registry = PluginRegistry.load()
    error = error_of(registry, "acme-broken")
    assert isinstance(error, PluginImportError)
    assert isinstance(error, ImportError)
    assert str(error).startswith(f"acme-broken does not import ({module}): ")
    assert error.__cause__ is not None
    assert registry.find("eviction_policy", "mru")
    with pytest.raises(PluginImportError, match="acme-broken"):
        registry.require_healthy()


def test_an_entry_point_to_nowhere_is_an_import_failure(install: Install) -> None:
    install("acme-broken", entry="acme_nowhere.plugin")
    with pytest.raises(PluginImportError, match=r"acme-broken does not import \(acme_nowhere.plugin\)"):
        PluginRegistry.load().require_healthy()


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("acme_nowhere:MRU", "ModuleNotFoundError: No module named 'acme_nowhere'"),
        ("sagellm.core:MRU", "AttributeError: .*'MRU'"),
        ("sagellm.core", "AttributeError"),
    ],
)
def test_a_target_that_does_not_import_is_named(install: Install, target: str, cause: str) -> None:
    install("acme-mru", good(target=target), version="0.9")
    registry = PluginRegistry.load()
    registry.require_healthy()
    expected = rf"eviction_policy 'mru' of acme-mru 0.9 does not import \({target}\): {cause}"
    with pytest.raises(PluginImportError, match=expected):
        registry.resolve("eviction_policy", "mru")


def test_a_class_that_lacks_methods_is_named_with_them(install: Install) -> None:
    source = """
from sagellm.core import KVAllocatorProtocol, Provider, hookimpl

class Half(KVAllocatorProtocol):
    def allocate(self, num_blocks): return []
    def free(self, block_ids): pass
    def all_allocated(self, block_ids): return False
    def check_integrity(self): pass

@hookimpl
def sagellm_providers():
    return [Provider("kv_allocator", "half", f"{__name__}:Half", "")]
"""
    install("acme-half", source)
    with pytest.raises(PluginMethodError) as caught:
        PluginRegistry.load().resolve("kv_allocator", "half")
    assert "kv_allocator 'half' of acme-half" in str(caught.value)
    assert "lacks metrics, num_free_blocks, which its protocol requires" in str(caught.value)


@pytest.mark.parametrize("api", ["7", "-1", "'0'"])
def test_a_plugin_for_another_protocol_version_is_refused(install: Install, api: str) -> None:
    install("acme-mru", f"SAGELLM_API = {api}\n{good()}", version="0.9")
    registry = PluginRegistry.load()
    error = error_of(registry, "acme-mru")
    assert isinstance(error, PluginVersionError)
    assert f"acme-mru 0.9 was written for protocol version {api}, this core has 0" in str(error)
    assert "mru" not in [entry.provider.name for entry in registry.providers()]


def test_a_plugin_that_states_this_version_is_accepted(install: Install) -> None:
    install("acme-mru", f"SAGELLM_API = 0\n{good()}")
    PluginRegistry.load().require_healthy()


@pytest.mark.parametrize("marker", ["@hookimpl\n", ""])
def test_a_misspelt_hook_names_the_nearest(install: Install, marker: str) -> None:
    source = f"from sagellm.core import hookimpl\n{marker}def sagellm_step_finish(record): ...\n"
    install("acme-observer", source)
    with pytest.raises(PluginHookError) as caught:
        PluginRegistry.load().require_healthy()
    assert "acme-observer implements the hook 'sagellm_step_finish', which does not exist" in str(
        caught.value
    )
    assert "Did you mean 'sagellm_step_finished'?" in str(caught.value)


def test_a_hook_without_its_marker_is_refused(install: Install) -> None:
    install("acme-mru", good().replace("@hookimpl", ""))
    with pytest.raises(PluginHookError, match="acme-mru defines 'sagellm_providers' without @hookimpl"):
        PluginRegistry.load().require_healthy()


def test_a_misspelt_argument_of_a_hook_is_refused(install: Install) -> None:
    install(
        "acme-observer", "from sagellm.core import hookimpl\n@hookimpl\ndef sagellm_step_finished(rec): ...\n"
    )
    with pytest.raises(PluginHookError, match=r"(?s)acme-observer cannot be registered: .*rec"):
        PluginRegistry.load().require_healthy()


@pytest.mark.parametrize("returned", ["None", "{'mru': 1}", "[('eviction_policy', 'mru', 'm:n', 's')]", "()"])
def test_a_provider_list_of_another_type_is_refused(install: Install, returned: str) -> None:
    source = (
        f"from sagellm.core import hookimpl\n@hookimpl\ndef sagellm_providers():\n    return {returned}\n"
    )
    install("acme-mru", source)
    error = error_of(PluginRegistry.load(), "acme-mru")
    assert isinstance(error, PluginHookError)
    assert "acme-mru: sagellm_providers must return a list of Provider, got " in str(error)


def test_a_provider_hook_that_raises_is_refused(install: Install) -> None:
    install(
        "acme-mru",
        "from sagellm.core import hookimpl\n@hookimpl\ndef sagellm_providers():\n    return 1 / 0\n",
    )
    with pytest.raises(PluginImportError, match="acme-mru: sagellm_providers failed: ZeroDivisionError"):
        PluginRegistry.load().require_healthy()


@pytest.mark.parametrize("raised", ["SystemExit(3)", "GeneratorExit()", "BaseException('moon')"])
def test_a_provider_hook_that_exits_breaks_only_its_plugin(install: Install, raised: str) -> None:
    install("acme-broken", f"{HOOK}def sagellm_providers():\n    raise {raised}\n")
    install("acme-mru", good())
    registry = PluginRegistry.load()
    error = error_of(registry, "acme-broken")
    assert isinstance(error, PluginImportError)
    assert f"acme-broken: sagellm_providers failed: {raised.partition('(')[0]}: " in str(error)
    assert registry.find("eviction_policy", "mru").distribution == "acme-mru"


def test_ctrl_c_interrupts_the_loading_of_plugins(install: Install) -> None:
    install("acme-slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry.load()


def test_a_module_that_fails_on_attribute_access_is_listed_with_its_error(install: Install) -> None:
    install("acme-broken", "def __getattr__(name):\n    raise SystemExit(name)\n")
    error = error_of(PluginRegistry.load(), "acme-broken")
    assert isinstance(error, PluginImportError)
    assert str(error) == "acme-broken cannot be registered: SystemExit: SAGELLM_API"


@pytest.mark.parametrize(
    "entry",
    [
        "['eviction_policy'], 'a', 'm:n', ''",
        "'eviction_policy', 1, 'm:n', ''",
        "'eviction_policy', 'a', None, ''",
    ],
)
def test_a_provider_of_other_types_is_refused(install: Install, entry: str) -> None:
    source = f"{HOOK}def sagellm_providers():\n    return [Provider({entry})]\n"
    install("acme-mru", f"from sagellm.core import Provider\n{source}")
    registry = PluginRegistry.load()
    error = error_of(registry, "acme-mru")
    assert isinstance(error, PluginHookError)
    assert "kind, name, target, summary, recommended_for and measured of a Provider must be strings" in str(
        error
    )
    assert registry.providers()


def test_a_provider_that_is_neither_automatic_nor_not_is_refused(install: Install) -> None:
    entry = "'eviction_policy', 'a', 'm:n', '', 'no'"
    source = f"{HOOK}def sagellm_providers():\n    return [Provider({entry})]\n"
    install("acme-mru", f"from sagellm.core import Provider\n{source}")
    error = error_of(PluginRegistry.load(), "acme-mru")
    assert isinstance(error, PluginHookError)
    assert "is_automatic of a Provider must be True or False, got str" in str(error)


def test_a_target_that_exits_is_named(install: Install) -> None:
    module = install("acme-mru", good(target="acme_exit:MRU"), version="0.9")
    Path(sys.path[0], "acme_exit.py").write_text("raise SystemExit(4)")
    assert module
    with pytest.raises(PluginImportError, match=r"'mru' of acme-mru 0.9 does not import .*: SystemExit: 4"):
        PluginRegistry.load().resolve("eviction_policy", "mru")


def test_a_built_in_name_stays_built_in_and_the_plugin_is_listed_with_the_clash(install: Install) -> None:
    source = good("null").replace(
        "return [",
        "return [Provider('eviction_policy', 'mru', '{NULL}', ''), ",
    )
    install("acme-null", source)
    registry = PluginRegistry.load()
    error = error_of(registry, "acme-null")
    assert isinstance(error, DuplicateProviderError)
    assert str(error) == (
        "acme-null provides the eviction_policy 'null', which sagellm-core-protocols provides; its own is "
        "'acme-null:null'"
    )
    assert registry.find("eviction_policy", "null").distribution == "sagellm-core-protocols"
    assert registry.find("eviction_policy", "acme-null:null").distribution == "acme-null"
    assert registry.find("eviction_policy", "mru").distribution == "acme-null"


def test_a_plugin_with_a_wrong_hook_observes_nothing(install: Install) -> None:
    source = f"{HOOK}def sagellm_kv_events(events): 1 / 0\n@hookimpl\ndef sagellm_step_finished(rec): ...\n"
    install("acme-observer", source)
    registry = PluginRegistry.load()
    assert isinstance(error_of(registry, "acme-observer"), PluginHookError)
    assert registry.callers("sagellm_kv_events") == []


def test_a_distribution_without_a_name_is_listed(install: Install, tmp_path: Path) -> None:
    install("acme-mru", good())
    (tmp_path / "acme_mru-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    (plugin,) = [each for each in PluginRegistry.load().plugins if "mru" in each.entry_point]
    assert (plugin.distribution, plugin.version, plugin.error) == ("unnamed", "unknown", None)


def test_with_an_allow_list_nothing_else_is_loaded(install: Install) -> None:
    install("acme-mru", good())
    install("acme-broken", "1 / 0")
    registry = PluginRegistry.load({"SAGELLM_PLUGINS_ALLOW": " Acme_MRU, sagellm-core-protocols"})
    assert [plugin.distribution for plugin in registry.plugins] == ["acme-mru", "sagellm-core-protocols"]
    registry.require_healthy()


def test_what_is_denied_is_not_even_imported(install: Install) -> None:
    module = install("acme-broken", "1 / 0")
    registry = PluginRegistry.load({"SAGELLM_PLUGINS_DENY": "ACME.broken,"})
    assert "acme-broken" not in [plugin.distribution for plugin in registry.plugins]
    assert module not in sys.modules
    registry.require_healthy()


def test_a_denied_plugin_stays_denied_though_allowed(install: Install) -> None:
    install("acme-mru", good())
    lists = {"SAGELLM_PLUGINS_ALLOW": "acme-mru", "SAGELLM_PLUGINS_DENY": "acme-mru"}
    assert PluginRegistry.load(lists).plugins == []


def test_hook_calls_are_printed_when_asked_for(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(
        "acme-observer",
        "from sagellm.core import hookimpl\n@hookimpl\ndef sagellm_step_finished(record): ...\n",
    )
    PluginRegistry.load({}).hook.sagellm_step_finished(record="quiet")
    assert capsys.readouterr().err == ""
    PluginRegistry.load({"SAGELLM_TRACE_HOOKS": "1"}).hook.sagellm_step_finished(record="one step")
    printed = capsys.readouterr().err
    assert "sagellm_step_finished" in printed
    assert "one step" in printed


def test_every_observer_is_called(install: Install) -> None:
    source = """
from sagellm.core import hookimpl
seen = []

@hookimpl
def sagellm_request_finished(record):
    seen.append(record)

@hookimpl
def sagellm_kv_events(events):
    seen.append(events)
"""
    modules = [install("acme-first", source), install("acme-second", source)]
    hook = PluginRegistry.load().hook
    hook.sagellm_request_finished(record="ended")
    hook.sagellm_kv_events(events=["stored"])
    for module in modules:
        assert sys.modules[module].seen == ["ended", ["stored"]]


def test_observers_can_be_called_one_by_one_in_the_order_of_the_hook() -> None:
    seen: list[str] = []

    class Observer:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def sagellm_step_finished(self) -> None:
            seen.append(self.name)

    registry = PluginRegistry()
    assert registry.callers("sagellm_step_finished") == []
    for name in ("one", "two", "three"):
        registry.register(Observer(name), distribution=name)
    registry.hook.sagellm_step_finished(record="step")
    for call in registry.callers("sagellm_step_finished"):
        call(record="step")
    assert seen == ["three", "two", "one"] * 2


def test_a_distribution_that_the_path_lists_twice_counts_once(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-mru", good())
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, str(tmp_path)])
    registry = PluginRegistry.load()
    assert [plugin.distribution for plugin in registry.plugins].count("acme-mru") == 1
    registry.find("eviction_policy", "mru")


def test_an_object_can_be_registered_without_an_entry_point() -> None:
    class Mine:
        @hookimpl
        def sagellm_providers(self) -> list[Provider]:
            return [
                Provider(
                    "eviction_policy",
                    "mine",
                    NULL,
                    "for a test",
                )
            ]

    registry = PluginRegistry()
    plugin = Mine()
    registry.register(plugin, distribution="in-a-notebook")
    assert registry.find("eviction_policy", "mine").qualified_name == "in-a-notebook:mine"
    with pytest.raises(PluginHookError, match="in-a-notebook cannot be registered"):
        registry.register(plugin, distribution="in-a-notebook")


def test_an_object_may_observe_and_provide_nothing() -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[object] = []

        @hookimpl
        def sagellm_step_finished(self, record: object) -> None:
            self.seen.append(record)

    registry, observer = PluginRegistry(), Observer()
    registry.register(observer, distribution="observer")
    registry.hook.sagellm_step_finished(record="step")
    assert observer.seen == ["step"]
    assert registry.providers() == []
