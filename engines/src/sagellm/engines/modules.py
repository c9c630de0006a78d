"""Finds the modules that a configuration names, and makes them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from sagellm.core import ConfigError, PluginRegistry
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.config.settings import named_providers

if TYPE_CHECKING:
    from sagellm.core import LogitsProcessorProtocol

BUILT_IN_PROCESSORS = tuple(
    f"sagellm-engines:{name}" for name in ("logit_bias", "min_tokens", "allowed_token_ids", "bad_words")
)
"""They make good what SamplingParams promises, so they are always there."""


class Modules:
    """Makes modules of a configuration by kind and name; each is resolved once, here.

    A name that nothing installed bears is an error at once, before a model is loaded.
    """

    def __init__(self, registry: PluginRegistry, config: EngineConfig) -> None:
        registry.require_healthy()
        for _, kind, name in named_providers(config.values()):
            registry.find(kind, name)
        self.registry = registry
        self.config = config

    def factory(self, kind: str, name: str) -> Callable[..., Any]:
        """Return the provider of a kind and name."""
        return cast(Callable[..., Any], self.registry.resolve(kind, name))

    def make(self, kind: str, name: str, *args: Any, **options: Any) -> Any:
        """Call the provider of a kind and name as its protocol says."""
        return self.factory(kind, name)(*args, **options)


def eviction_policy(modules: Modules, name: str, options: dict[str, Any]) -> Any:
    """Make the eviction policy. Raises ConfigError for options that it does not take."""
    factory = modules.factory("eviction_policy", name)
    try:
        signature(factory).bind(**options)
    except TypeError as error:
        takes = ", ".join(signature(factory).parameters) or "no options"
        raise ConfigError(f"prefix_cache.eviction_options is {options!r}; {name!r} takes {takes}") from error
    return factory(**options)


def logits_processors(modules: Modules, vocab_size: int) -> dict[str, LogitsProcessorProtocol[Any]]:
    """Make the logits processors, the built-in ones first; one that is named twice is made once."""
    made: dict[Callable[..., Any], tuple[str, LogitsProcessorProtocol[Any]]] = {}
    for name in (*BUILT_IN_PROCESSORS, *modules.config.sampling.logits_processors):
        factory = modules.factory("logits_processor", name)
        if factory not in made:
            made[factory] = (name.removeprefix("sagellm-engines:"), factory(vocab_size))
    return dict(made.values())
