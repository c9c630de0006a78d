"""Lists what plugins offer, and turns a kind and a name into an implementation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, TypeVar, cast

import pluggy

from sagellm.core.errors import (
    DuplicateProviderError,
    PluginError,
    PluginHookError,
    PluginImportError,
    PluginMethodError,
    PluginVersionError,
    UnknownKindError,
    UnknownProviderError,
    nearest,
)
from sagellm.core.plugins import hookspecs
from sagellm.core.plugins.entry_points import EntryPoint, entry_points, normalise
from sagellm.core.plugins.failure import contained, described
from sagellm.core.plugins.options import ChosenProvider, ProviderSpec
from sagellm.core.plugins.provider import KINDS, Command, Provider
from sagellm.core.version import SAGELLM_API, is_compatible

GROUP = "sagellm"
_MAX_SHOWN = 200  # characters of a value in a message
_BUILT_IN = frozenset(
    f"sagellm-{folder}"
    for folder in (
        *("core-protocols", "prefix-cache", "kv-pool", "eviction-policy", "scheduler-ir"),
        *("lifetime-predictor", "accel", "comm", "engines", "server", "lab", "testing"),
    )
)
"""sageLLM's own distributions; they keep a plain name even if another distribution provides it."""

_Offer = TypeVar("_Offer", Provider, Command)


@dataclass(frozen=True)
class InstalledProvider:
    """A provider and the distribution that it came with."""

    provider: Provider
    distribution: str
    version: str

    @property
    def qualified_name(self) -> str:
        """`distribution:name`, which selects this one among providers of equal name."""
        return f"{self.distribution}:{self.provider.name}"

    @property
    def label(self) -> str:
        """The name in error messages: kind, name, distribution and version."""
        return f"{self.provider.kind} {self.provider.name!r} of {self.distribution} {self.version}"


@dataclass(frozen=True)
class InstalledCommand:
    """A command and the distribution that it came with."""

    command: Command
    distribution: str
    version: str


@dataclass(frozen=True)
class InstalledPlugin:
    """A distribution with an entry point, and the error that makes it, or some of its names, unusable."""

    distribution: str
    version: str
    entry_point: str
    error: PluginError | None = None


class PluginRegistry:
    """All installed plugins, read once.

    Loading raises nothing but KeyboardInterrupt: a broken plugin is kept with its error and stops only what
    needs it. `require_healthy` raises that error. Resolve once and keep the object: nothing in a step loop
    goes through here.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        if environ.get("SAGELLM_TRACE_HOOKS") == "1":
            self._manager.trace.root.setwriter(sys.stderr.write)
            self._manager.enable_tracing()
        self.plugins: list[InstalledPlugin] = []
        self._providers: list[InstalledProvider] = []
        self._commands: list[InstalledCommand] = []
        self._owners: dict[str, str] = {}  # by module: the third-party distribution it belongs to

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> PluginRegistry:
        """Read the entry points of every installed distribution.

        `SAGELLM_PLUGINS_ALLOW` and `SAGELLM_PLUGINS_DENY` hold distribution names, separated
        by commas; with an allow list nothing else is loaded. `SAGELLM_TRACE_HOOKS=1` prints every
        hook call to standard error.
        """
        registry = cls(environ)
        allow = _names(environ.get("SAGELLM_PLUGINS_ALLOW", ""))
        deny = _names(environ.get("SAGELLM_PLUGINS_DENY", ""))
        for entry_point in entry_points(GROUP):
            distribution = entry_point.distribution
            if distribution not in deny and (not allow or distribution in allow):
                registry._add(entry_point)
        registry.plugins = [registry._marked(plugin) for plugin in registry.plugins]
        return registry

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks, to be called with keyword arguments."""
        return self._manager.hook

    def callers(self, name: str) -> list[pluggy.HookCaller]:
        """Return one caller per plugin that implements a hook now, in the order in which all are called."""
        plugins = [each.plugin for each in reversed(getattr(self.hook, name).get_hookimpls())]
        return [
            self._manager.subset_hook_caller(name, [other for other in plugins if other is not plugin])
            for plugin in plugins
        ]

    def register(self, plugin: object, *, distribution: str, version: str = "0") -> None:
        """Add a plugin object that no entry point names. Raises the error that makes it unusable."""
        api = getattr(plugin, "SAGELLM_API", 0)
        if not is_compatible(api):
            raise PluginVersionError(
                f"{distribution} {version} was written for protocol version {api!r}, this core has "
                f"{SAGELLM_API}; install a version of {distribution} that matches"
            )
        self._check_hooks(plugin, distribution)
        providers = [InstalledProvider(p, distribution, version) for p in _providers_of(plugin, distribution)]
        commands = [InstalledCommand(c, distribution, version) for c in _commands_of(plugin, distribution)]
        if self._manager.is_registered(plugin):
            raise PluginHookError(f"{distribution} cannot be registered: it is registered already")
        try:
            self._manager.register(plugin)
        except (pluggy.PluginValidationError, ValueError) as error:  # wrong arguments
            if self._manager.is_registered(plugin):  # before 1.7 pluggy kept the hooks that were right
                self._manager.unregister(plugin)
            raise PluginHookError(f"{distribution} cannot be registered: {error}") from error
        self._providers += providers
        self._commands += commands
        if distribution not in _BUILT_IN:
            own = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
            modules = [own, *(each.provider.target.partition(":")[0] for each in providers)]
            modules = [each for each in modules if not each.startswith("sagellm.")]
            self._owners |= dict.fromkeys(modules, f"{distribution} {version}")

    def providers(self, kind: str | None = None) -> list[InstalledProvider]:
        """Return what is installed, of one kind or of all, sorted by kind and name.

        Raises UnknownKindError.
        """
        if kind is not None:
            _check_kind(kind, "asked for")
        found = [entry for entry in self._providers if kind in (None, entry.provider.kind)]
        return sorted(found, key=lambda entry: (entry.provider.kind, entry.provider.name, entry.distribution))

    def commands(self) -> list[InstalledCommand]:
        """Return what plugins add to `sage llm`: each name once, and sageLLM's own before others."""
        first: dict[str, InstalledCommand] = {}
        for entry in sorted(self._commands, key=lambda entry: entry.distribution not in _BUILT_IN):
            first.setdefault(entry.command.name, entry)
        return list(first.values())

    def describe(self, error: BaseException) -> str:
        """Return the type and text of an error, preceded by the plugin and line where it arose, if any.

        The plugin is the innermost in the traceback, known by the modules of its entry point and providers.
        """
        whose = ""
        for frame, line in walk_tb(error.__traceback__):
            owner = self._owners.get(frame.f_globals.get("__name__", ""))
            if owner is not None:
                code = frame.f_code
                whose = f"{owner} ({Path(code.co_filename).name}, line {line}, in {code.co_name}): "
        return whose + described(error)

    def require_healthy(self) -> None:
        """Raise the error of the first plugin that cannot be used."""
        for plugin in self.plugins:
            if plugin.error is not None:
                raise plugin.error

    def find(self, kind: str, name: str) -> InstalledProvider:
        """Return the provider of a kind with this name, or with `distribution:name`.

        A plain name that sageLLM provides itself means that provider. Raises UnknownKindError,
        UnknownProviderError or DuplicateProviderError.
        """
        installed = self.providers(kind)
        distribution, colon, bare_name = name.rpartition(":")
        wanted = f"{normalise(distribution)}:{bare_name}" if colon else name
        matches = [entry for entry in installed if wanted in (entry.provider.name, entry.qualified_name)]
        matches = [entry for entry in matches if entry.distribution in _BUILT_IN] or matches
        if len(matches) == 1:
            return matches[0]
        if matches:
            both = " and ".join(f"{entry.qualified_name} ({entry.provider.target})" for entry in matches)
            raise DuplicateProviderError(
                f"{kind} {name!r} is provided by {both}; name one of them as {matches[0].qualified_name!r}"
            )
        names = sorted({entry.qualified_name if colon else entry.provider.name for entry in installed})
        listed = ", ".join(names) or "none"
        loaded = {entry.distribution for entry in self._providers}
        broken = "".join(
            f" {p.distribution} could not be loaded: {p.error}"
            for p in self.plugins
            if p.error and p.distribution not in loaded
        )
        raise UnknownProviderError(
            f"no installed {kind} is called {name!r}; installed: {listed}.{nearest(name, names)}{broken}"
        )

    def resolve(self, kind: str, name: str) -> object:
        """Import and return the target of a provider: a class or another callable.

        Raises what `find` raises, PluginImportError if the target does not import, and PluginMethodError if
        it is a class that lacks methods of its protocol.
        """
        entry = self.find(kind, name)
        module_name, _, attribute = entry.provider.target.partition(":")
        with _import_errors(f"{entry.label} does not import ({entry.provider.target})"):
            target: object = getattr(import_module(module_name), attribute)
        _check_methods(entry, target)
        return target

    def choose(self, kind: str, spec: ProviderSpec | str) -> ChosenProvider:
        """Import the provider that a setting names, to check its options or to make it.

        A string is a name without options. Raises what `resolve` raises.
        """
        spec = ProviderSpec.of(spec)
        factory = cast("Callable[..., object]", self.resolve(kind, spec.name))
        return ChosenProvider(kind, spec, self.find(kind, spec.name).label, factory)

    def make(self, kind: str, spec: ProviderSpec | str, /, *arguments: Any, **keywords: Any) -> Any:
        """Make the provider that a setting names, with the engine's arguments (`KINDS`) and its options.

        Raises what `choose` raises, ConfigError for invalid options, PluginError if it fails.
        """
        return self.choose(kind, spec).make(*arguments, **keywords)

    def _add(self, entry_point: EntryPoint) -> None:
        distribution, version, name = entry_point
        problem: PluginError | None = None
        try:
            with _import_errors(f"{distribution} does not import ({name})"):
                module = import_module(name)
            with _import_errors(f"{distribution} cannot be registered"):
                self.register(module, distribution=distribution, version=version)
        except PluginError as error:
            problem = error
        self.plugins.append(InstalledPlugin(distribution, version, name, problem))

    def _marked(self, plugin: InstalledPlugin) -> InstalledPlugin:
        """Return a plugin with an error if it offers names of others, which then do not select it."""
        if plugin.distribution in _BUILT_IN or plugin.error is not None:
            return plugin
        clashes = list(self._clashes(plugin.distribution))
        if not clashes:
            return plugin
        problem = DuplicateProviderError(f"{plugin.distribution} provides {', and '.join(clashes)}")
        return replace(plugin, error=problem)

    def _clashes(self, distribution: str) -> Iterator[str]:
        built_in = [entry for entry in self._providers if entry.distribution in _BUILT_IN]
        ours = {entry.provider[:2]: entry.distribution for entry in built_in}
        for entry in self._providers:
            owner = ours.get(entry.provider[:2])
            if entry.distribution == distribution and owner is not None:
                yield (
                    f"the {entry.provider.kind} {entry.provider.name!r}, which {owner} provides; "
                    f"its own is {entry.qualified_name!r}"
                )
        owners = {entry.command.name: entry.distribution for entry in self.commands()}
        for name in (each.command.name for each in self._commands if each.distribution == distribution):
            if owners[name] != distribution:
                yield f"the command {name!r}, which {owners[name]} provides"
            group, space, _ = name.partition(" ")
            if space and group not in owners:
                yield f"the command {name!r} in a group that no plugin provides"

    def _check_hooks(self, plugin: object, distribution: str) -> None:
        known = [name for name in dir(hookspecs) if name.startswith("sagellm_")]
        for name in dir(plugin):
            is_marked = self._manager.parse_hookimpl_opts(plugin, name) is not None
            if not is_marked and not (name.startswith("sagellm_") and callable(getattr(plugin, name))):
                continue
            if name not in known:
                raise PluginHookError(
                    f"{distribution} implements the hook {name!r}, which does not exist; "
                    f"hooks: {', '.join(known)}.{nearest(name, known)}"
                )
            if not is_marked:
                raise PluginHookError(f"{distribution} defines {name!r} without @hookimpl; add it")


def _check_methods(entry: InstalledProvider, target: object) -> None:
    missing = sorted(getattr(target, "__abstractmethods__", ())) if isinstance(target, type) else []
    if missing:
        raise PluginMethodError(
            f"{entry.label} lacks {', '.join(missing)}, which its protocol requires; implement "
            f"{'them' if missing[1:] else 'it'} in {entry.provider.target}"
        )


@contextmanager
def _import_errors(what: str) -> Iterator[None]:
    """Turn anything that plugin code raises, even SystemExit, into a PluginImportError starting with `what`.

    PluginError and KeyboardInterrupt propagate.
    """
    with contained(PluginError) as failure:
        yield
    if failure.error is not None:
        raise PluginImportError(f"{what}: {described(failure.error)}") from failure.error


def _providers_of(plugin: object, distribution: str) -> list[Provider]:
    found = _offered(plugin, distribution, "sagellm_providers", Provider)
    targets: dict[tuple[str, str], str] = {}
    for kind, name, target, *_ in found:
        _check_kind(kind, f"{distribution} provides {name!r} of")
        if (kind, name) in targets:
            raise DuplicateProviderError(
                f"{distribution} provides the {kind} {name!r} twice: {targets[kind, name]} and {target}"
            )
        targets[kind, name] = target
    return found


def _commands_of(plugin: object, distribution: str) -> list[Command]:
    found = _offered(plugin, distribution, "sagellm_commands", Command)
    names = [command.name for command in found]
    for name in names:
        if names.count(name) > 1:
            raise DuplicateProviderError(f"{distribution} provides the command {name!r} twice")
    return found


def _offered(plugin: object, distribution: str, hook: str, kind: type[_Offer]) -> list[_Offer]:
    """Return what a hook of a plugin offers. Raises PluginError if it fails or gives anything else."""
    offer = getattr(plugin, hook, None)
    if offer is None:
        return []
    with _import_errors(f"{distribution}: {hook} failed"):
        found = offer()
    if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
        with _import_errors(f"{distribution}: {hook} must return a list of {kind.__name__}"):
            got = repr(found)
        raise PluginHookError(
            f"{distribution}: {hook} must return a list of {kind.__name__}, got {got[:_MAX_SHOWN]}"
        )
    flags = [name for name, default in kind._field_defaults.items() if type(default) is bool]
    texts = [name for name in kind._fields if name not in flags]
    for entry in found:
        given = entry._asdict()
        if not all(type(given[name]) is str for name in texts):
            raise PluginHookError(
                f"{distribution}: {', '.join(texts[:-1])} and {texts[-1]} of a {kind.__name__} "
                f"must be strings, got {', '.join(type(given[name]).__name__ for name in texts)}"
            )
        for name in flags:
            if type(given[name]) is not bool:
                raise PluginHookError(
                    f"{distribution}: {name} of a {kind.__name__} must be True or False, got "
                    f"{type(given[name]).__name__}"
                )
    return found


def _check_kind(kind: str, context: str) -> None:
    if kind not in KINDS:
        raise UnknownKindError(
            f"{context} the unknown kind {kind!r}; kinds: {', '.join(KINDS)}.{nearest(kind, KINDS)}"
        )


def _names(text: str) -> set[str]:
    return {normalise(name) for name in text.split(",") if name.strip()}
