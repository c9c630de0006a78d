"""Builds the modules that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sagellm.core import (
    ConfigError,
    EngineProtocol,
    ExtraArg,
    PluginError,
    PluginRegistry,
    ProviderSpec,
    Runtime,
    get_logger,
)
from sagellm.core.plugins.failure import contained
from sagellm.core.plugins.options import ChosenProvider
from sagellm.engines.config.schema import SETTINGS, EngineConfig, NamedProvider

if TYPE_CHECKING:
    from sagellm.core import LogitsProcessorProtocol

logger = get_logger(__name__)

BUILT_IN_PROCESSORS = tuple(
    f"sagellm-engines:{name}" for name in ("logit_bias", "min_tokens", "allowed_token_ids", "bad_words")
)
"""They implement what SamplingParams promises, so they are always present."""

LIFETIME_PREDICTOR = "lifetime_predictor"
"""A kind of module, and the keyword of a policy that wants one."""


class Modules:
    """Builds a configuration's modules by kind and name; each is resolved once, here.

    An unknown name or option is an error at once, before a model is loaded. A plugin with an error matters
    only if the configuration names it. `config` is replaced when a policy is switched.
    """

    def __init__(self, registry: PluginRegistry, config: EngineConfig) -> None:
        self.registry = registry
        self.config = config
        check_named(registry, config.providers())

    def changed(self, values: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration with other settings under these dotted keys, for `config`.

        Raises ConfigError or UnknownProviderError, as at the start.
        """
        config = self.config.with_values(values)
        check_named(self.registry, (each for each in config.providers() if each.key in values))
        return config

    def make(self, kind: str, spec: ProviderSpec | str, *args: Any, **keywords: Any) -> Any:
        """Build a provider according to its protocol, with its options.

        Raises ConfigError, which names the setting, for options that it does not take, and PluginError, which
        names the distribution, if its factory fails.
        """
        return _keyed(SETTINGS.get(kind, kind), self.registry.make, kind, spec, *args, **keywords)

    def make_optional(self, kind: str, spec: ProviderSpec | None) -> Any:
        """Build a provider as `make` does; None if none is named."""
        return None if spec is None else self.make(kind, spec)

    def eviction_policy(self, spec: ProviderSpec) -> Any:
        """Build an eviction policy. If it takes a `lifetime_predictor`, it gets its own new one to train."""
        given = {}
        if self.registry.choose("eviction_policy", spec).takes(LIFETIME_PREDICTOR):
            given[LIFETIME_PREDICTOR] = self.make(LIFETIME_PREDICTOR, self.config.predictor.name)
        return self.make("eviction_policy", spec, **given)

    def label(self, kind: str, name: str) -> str:
        """Return how errors name a provider: kind, name, distribution and version."""
        return self.registry.find(kind, name).label


def check_named(registry: PluginRegistry, named: Iterable[NamedProvider]) -> None:
    """Raise UnknownProviderError for a name that is not installed, ConfigError for wrong options."""
    for key, kind, spec in named:
        registry.find(kind, spec.name)
        if spec.options:
            _keyed(key, registry.choose(kind, spec).check)


def _keyed(key: str, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return call(*args, **keywords)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def engine(modules: Modules, runtime: Runtime) -> EngineProtocol:
    """Make the engine, with a warning for each plugin that has an error.

    Raises ConfigError for unknown options, PluginError for a factory that fails.
    """
    for plugin in modules.registry.plugins:
        if plugin.error is not None:
            logger.warning("the plugin %s %s: %s", plugin.distribution, plugin.version, plugin.error)
    spec = modules.config.engine.name
    chosen: ChosenProvider = modules.registry.choose("engine", spec)
    made = chosen.make(modules.config, registry=modules.registry, runtime=runtime)
    if not isinstance(made, EngineProtocol):
        raise PluginError(f"engine {spec.name!r} makes a {type(made).__name__}; it must be an EngineProtocol")
    return made


def logits_processors(modules: Modules, vocab_size: int) -> dict[str, LogitsProcessorProtocol[Any]]:
    """Build the logits processors, the built-in ones first; one named twice is built once.

    Raises PluginError, which names the processor and its distribution, if one cannot be made.
    """
    made: dict[Callable[..., Any], tuple[str, LogitsProcessorProtocol[Any]]] = {}
    built_in = map(ProviderSpec, BUILT_IN_PROCESSORS)
    for spec in (*built_in, *modules.config.sampling.logits_processors):
        factory = modules.registry.choose("logits_processor", spec).factory
        if factory not in made:
            processor = modules.make("logits_processor", spec, vocab_size)
            made[factory] = (spec.name.removeprefix("sagellm-engines:"), processor)
    return dict(made.values())


def extra_args(
    modules: Modules, processors: Mapping[str, LogitsProcessorProtocol[Any]]
) -> tuple[ExtraArg, ...]:
    """Return the entries of a request's `extra_args` that processors read, asking each processor once.

    Raises PluginError, which names the processor and its distribution, if one fails there.
    """
    return tuple(arg for name, each in processors.items() for arg in _extra_args(modules, name, each))


def _extra_args(modules: Modules, name: str, processor: LogitsProcessorProtocol[Any]) -> list[ExtraArg]:
    problem = "failed"
    with contained() as failure:
        found: Any = processor.extra_args()
        problem = f"returned {found!r}"
        declared = list(found)
        wrong = [arg for arg in declared if not isinstance(arg, ExtraArg) or not isinstance(arg.name, str)]
        if wrong:
            raise TypeError(f"{wrong[0]!r} is not an ExtraArg with a string as its name")
        return declared
    error = failure.error
    raise PluginError(
        f"{modules.label('logits_processor', name)}: extra_args() {problem}; "
        f"{type(error).__name__}: {error}; it must return a list of ExtraArg"
    ) from error
