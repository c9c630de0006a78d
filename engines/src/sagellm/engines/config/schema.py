"""The complete configuration of an engine: every section, by flat names and by dotted keys.

Adapting it to a machine gives a new object (`with_values`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from pydantic import Field
from pydantic.fields import FieldInfo

from sagellm.core import ConfigError, ProviderSpec, nearest
from sagellm.engines.config.explain import unknown_key
from sagellm.engines.config.sections import (
    Checked,
    CommConfig,
    EngineKindConfig,
    ForwardConfig,
    GrammarConfig,
    KVConfig,
    ModelConfig,
    PredictorConfig,
    PrefixCacheConfig,
    RecordingConfig,
    SamplingConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculationConfig,
    TraceConfig,
)
from sagellm.engines.config.settings import ALL_NAMES, FLAT_NAMES
from sagellm.engines.config.vllm_names import without_vllm_names


class EngineConfig(Checked):
    """Everything that an engine can be told at its start."""

    engine: EngineKindConfig = Field(default_factory=EngineKindConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    kv: KVConfig = Field(default_factory=KVConfig)
    prefix_cache: PrefixCacheConfig = Field(default_factory=PrefixCacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    predictor: PredictorConfig = Field(default_factory=PredictorConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    forward: ForwardConfig = Field(default_factory=ForwardConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    grammar: GrammarConfig = Field(default_factory=GrammarConfig)
    trace: TraceConfig = Field(default_factory=TraceConfig)
    recording: RecordingConfig = Field(default_factory=RecordingConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)

    @classmethod
    def from_flat(cls, **values: Any) -> Self:
        """Build a configuration from flat names such as `block_size` (`settings.ALL_NAMES`).

        Raises ConfigError for an unknown name or an invalid value.
        """
        return cls.from_values(flat_to_dotted(values, ALL_NAMES))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from dotted keys (`{"kv.block_size": 16}`); the rest are defaults."""
        return cls(**_nest(values.items()))

    def values(self) -> dict[str, Any]:
        """Return every setting under its dotted key, in the order of the schema, as plain values."""
        return {
            f"{section}.{name}": _plain(value)
            for section in type(self).model_fields
            for name, value in getattr(self, section)
        }

    def given_values(self) -> dict[str, Any]:
        """Return the settings that were given, in their final form, under their dotted keys."""
        return {
            f"{section}.{name}": getattr(getattr(self, section), name)
            for section in type(self).model_fields
            for name in getattr(self, section).model_fields_set
        }

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a checked copy in which the settings under these dotted keys are replaced."""
        return type(self).from_values({**self.values(), **values})

    def with_flat(self, values: Mapping[str, Any]) -> Self:
        """Return a checked copy with settings by flat names; vLLM's that change nothing are left out."""
        return self.with_values(flat_to_dotted(without_vllm_names(values)))

    def providers(self) -> Iterator[NamedProvider]:
        """Yield every provider that a setting names."""
        for key, kind in PROVIDER_KINDS.items():
            section, _, name = key.partition(".")
            named = getattr(getattr(self, section), name)
            for spec in named if isinstance(named, tuple) else (named,):
                if spec is not None and not (key in WITH_AUTO and spec.name == AUTO):
                    yield NamedProvider(key, kind, spec)


AUTO = "auto"
"""As the forward backend, the first one that can run the model; as a parser, the first that fits it."""
WITH_AUTO = ("forward.backend", "server.tool_parser", "server.reasoning_parser")
"""Settings that may be `auto`."""


class NamedProvider(NamedTuple):
    """A provider named by a setting: the setting's dotted key, the kind, and the provider."""

    key: str
    kind: str
    spec: ProviderSpec


SECTIONS: dict[str, type[Checked]] = {
    kind.section: kind
    for kind in (
        EngineKindConfig,
        ModelConfig,
        KVConfig,
        PrefixCacheConfig,
        SchedulerConfig,
        PredictorConfig,
        SpeculationConfig,
        ForwardConfig,
        SamplingConfig,
        GrammarConfig,
        TraceConfig,
        RecordingConfig,
        CommConfig,
        ServerConfig,
    )
}
"""Section name → its model."""


def field_of(key: str) -> FieldInfo:
    """Return the schema's field for an existing dotted key."""
    section, _, name = key.partition(".")
    return SECTIONS[section].model_fields[name]


PROVIDER_KINDS: dict[str, str] = {
    f"{section}.{name}": str(field.json_schema_extra["kind"])
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
    if isinstance(field.json_schema_extra, dict)
}
"""Dotted keys whose values name installed providers → the kind that they name."""

SETTINGS = {kind: key for key, kind in PROVIDER_KINDS.items()}
"""Kind → the setting that names its providers, for kinds that a configuration chooses."""


def flat_to_dotted(values: Mapping[str, Any], known: Mapping[str, str] = FLAT_NAMES) -> dict[str, Any]:
    """Rename flat names to dotted keys, by default an engine's. Raises ConfigError for an unknown one."""
    for name in values:
        if name not in known:
            listed = ", ".join(known)
            raise ConfigError(f"unknown setting {name!r}; settings: {listed}.{nearest(name, known)}")
    return {known[name]: value for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, ProviderSpec):
        return value.plain()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _nest(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in items:
        section, _, name = key.partition(".")
        if section not in SECTIONS:
            raise ConfigError(unknown_key(section, "", list(SECTIONS)))
        nested.setdefault(section, {})[name] = value
    return nested
