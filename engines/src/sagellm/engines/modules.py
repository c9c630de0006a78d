"""Finds the modules that a configuration names, and makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from sagellm.core import (
    Clock,
    ConfigError,
    EngineProtocol,
    ExtraArg,
    KVIdentity,
    PluginError,
    PluginRegistry,
    PrefixCacheProtocol,
    Runtime,
    get_logger,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.config.settings import named_providers
from sagellm.engines.plugin_failure import call_plugin

if TYPE_CHECKING:
    from sagellm.core import LogitsProcessorProtocol

logger = get_logger(__name__)

BUILT_IN_PROCESSORS = tuple(
    f"sagellm-engines:{name}" for name in ("logit_bias", "min_tokens", "allowed_token_ids", "bad_words")
)
"""They make good what SamplingParams promises, so they are always there."""

LIFETIME_PREDICTOR = "lifetime_predictor"
"""A kind of module, and the keyword of a policy that wants one."""


class Modules:
    """Makes a configuration's modules by kind and name; each is resolved once, here.

    An unknown name is an error at once, before a model is loaded. A plugin with an error matters only if the
    configuration names it.
    """

    def __init__(self, registry: PluginRegistry, config: EngineConfig) -> None:
        for _, kind, name in named_providers(config.values()):
            registry.find(kind, name)
        self.registry = registry
        self.config = config

    def factory(self, kind: str, name: str) -> Callable[..., Any]:
        """Return the provider of a kind and name."""
        return cast(Callable[..., Any], self.registry.resolve(kind, name))

    def make(self, kind: str, name: str, *args: Any, **options: Any) -> Any:
        """Call the provider of a kind and name as its protocol says.

        Raises PluginError, which names the distribution, if its factory fails.
        """
        return self.call(kind, name, self.factory(kind, name), *args, **options)

    def call(self, kind: str, name: str, factory: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a factory of this kind and name's provider; errors are as in `make`."""
        return call_plugin(self.label(kind, name), "its factory", factory, *args, **options)

    def label(self, kind: str, name: str) -> str:
        """Return how errors name a provider: kind, name, distribution and version."""
        return self.registry.find(kind, name).label


def engine(modules: Modules, runtime: Runtime) -> EngineProtocol:
    """Make the engine, with a warning for each plugin that has an error.

    Raises ConfigError for unknown options, PluginError for a factory that fails.
    """
    for plugin in modules.registry.plugins:
        if plugin.error is not None:
            logger.warning("the plugin %s %s: %s", plugin.distribution, plugin.version, plugin.error)
    settings = modules.config.engine
    factory = modules.factory("engine", settings.name)
    given = {"registry": modules.registry, "runtime": runtime}
    args = (modules.config,)
    _check_options(factory, "engine.options", settings.name, settings.options, given, args)
    made = modules.call("engine", settings.name, factory, *args, **given, **settings.options)
    if not isinstance(made, EngineProtocol):
        raise PluginError(
            f"engine {settings.name!r} makes a {type(made).__name__}; it must be an EngineProtocol"
        )
    return made


def eviction_policy(modules: Modules, name: str, options: dict[str, Any]) -> Any:
    """Make the eviction policy. Raises ConfigError for options that it does not take.

    One that takes a `lifetime_predictor` gets a new one of the configured kind, to teach it what it likes.
    """
    factory = modules.factory("eviction_policy", name)
    given: dict[str, Any] = {}
    if LIFETIME_PREDICTOR in signature(factory).parameters:
        given[LIFETIME_PREDICTOR] = modules.make(LIFETIME_PREDICTOR, modules.config.predictor.name)
    _check_options(factory, "prefix_cache.eviction_options", name, options, given)
    return modules.call("eviction_policy", name, factory, **given, **options)


def prefix_cache(
    modules: Modules, max_blocks: int, policy: Any, clock: Clock, identity: KVIdentity
) -> PrefixCacheProtocol:
    """Make the prefix cache. Raises ConfigError for options that it does not take."""
    settings = modules.config.prefix_cache
    name, options = (settings.name, settings.options) if settings.enabled else ("null", {})
    factory = modules.factory("prefix_cache", name)
    given = {"eviction_policy": policy, "clock": clock, "identity": identity}
    args = (max_blocks, modules.config.kv.block_size)
    _check_options(factory, "prefix_cache.options", name, options, given, args)
    cache: PrefixCacheProtocol = modules.call("prefix_cache", name, factory, *args, **given, **options)
    return cache


def _check_options(
    factory: Callable[..., Any],
    key: str,
    name: str,
    options: dict[str, Any],
    given: Mapping[str, Any],
    args: Sequence[Any] = (),
) -> None:
    names = signature(factory).parameters
    try:
        if not given.keys().isdisjoint(options):
            raise TypeError("these are not the user's to give")
        signature(factory).bind(*args, **given, **options)
    except TypeError as error:
        known = (each for each in list(names)[len(args) :] if each not in given)
        takes = ", ".join(known) or "no options"
        raise ConfigError(f"{key} is {options!r}; {name!r} takes {takes}") from error


def logits_processors(modules: Modules, vocab_size: int) -> dict[str, LogitsProcessorProtocol[Any]]:
    """Make the logits processors, the built-in ones first; one that is named twice is made once.

    Raises PluginError, which names the processor and its distribution, if one cannot be made.
    """
    made: dict[Callable[..., Any], tuple[str, LogitsProcessorProtocol[Any]]] = {}
    for name in (*BUILT_IN_PROCESSORS, *modules.config.sampling.logits_processors):
        factory = modules.factory("logits_processor", name)
        if factory not in made:
            processor = modules.call("logits_processor", name, factory, vocab_size)
            made[factory] = (name.removeprefix("sagellm-engines:"), processor)
    return dict(made.values())


def extra_args(
    modules: Modules, processors: Mapping[str, LogitsProcessorProtocol[Any]]
) -> tuple[ExtraArg, ...]:
    """Return the entries of a request's `extra_args` that processors read, each asked once.

    Raises PluginError, which names the processor and its distribution, if one fails there.
    """
    return tuple(arg for name, each in processors.items() for arg in _extra_args(modules, name, each))


def _extra_args(modules: Modules, name: str, processor: LogitsProcessorProtocol[Any]) -> list[ExtraArg]:
    problem = "failed"
    try:
        found: Any = processor.extra_args()
        problem = f"returned {found!r}"
        declared = list(found)
        wrong = [arg for arg in declared if not isinstance(arg, ExtraArg) or not isinstance(arg.name, str)]
        if wrong:
            raise TypeError(f"{wrong[0]!r} is not an ExtraArg with a string as its name")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(
            f"{modules.label('logits_processor', name)}: extra_args() {problem}; "
            f"{type(error).__name__}: {error}; it must return a list of ExtraArg"
        ) from error
    return declared
