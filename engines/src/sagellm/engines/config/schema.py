"""The configuration of an engine: frozen, keyword-only, one default each.

Adapting it to a machine returns a new object (`with_values`). Every mistake is a ConfigError
that names the key, the value and what is possible.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from sagellm.core import ConfigError, nearest
from sagellm.engines.config.explain import explain, unknown_key
from sagellm.engines.config.settings import ALL_NAMES, FLAT_NAMES

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_MAX_SEED = 2**63 - 1


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_names(value: object) -> object:
    """Take `a,b` and lists too: a shell has no lists, and YAML has no tuples."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list) else value


Name = Annotated[str, Field(min_length=1)]
PathOrName = Annotated[Name, BeforeValidator(_as_text)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_as_names)]


class _Checked(BaseModel):
    """A frozen model that refuses unknown keys and raises ConfigError, alone or inside another."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    section: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self), self.section) from None


class ModelConfig(_Checked):
    """Which checkpoint is run, on what, and in which number format."""

    section: ClassVar[str] = "model"

    name: PathOrName | None = Field(default=None, description="model: a directory or a hub id")
    tokenizer: PathOrName | None = Field(
        default=None, description="tokenizer: a directory or a hub id, if not the model's own"
    )
    revision: Name | None = Field(default=None, description="branch, tag or commit of a hub id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="number format of weights and KV: auto, float32, bfloat16 or float16"
    )
    device: str = Field(default="auto", description="where the model runs: auto, cpu, cuda or cuda:N")
    quantization: Name | None = Field(
        default=None, description="quantizer that the weights go through at loading"
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="longest prompt and output together, in tokens; null: the model's own"
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=_MAX_SEED,
        description="seed of requests that bring none; null: a fresh one each",
    )

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError("auto, cpu, cuda or cuda:N")
        return value


class KVConfig(_Checked):
    """How KV memory is cut into blocks."""

    section: ClassVar[str] = "kv"

    block_size: int = Field(default=16, ge=1, le=1024, description="tokens in a KV block")
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks; null: as many as the memory at hand allows"
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the free memory for KV; null: 0.9 on a GPU, 0.5 on a CPU",
    )
    pool: Name = Field(default="paged", description="KV pool by name")
    allocator: Name = Field(default="free_list", description="allocator of KV blocks by name")


class PrefixCacheConfig(_Checked):
    """Reuse of KV between requests that begin alike."""

    section: ClassVar[str] = "prefix_cache"

    enabled: bool = Field(default=True, description="reuse the KV of prompts that begin alike")
    name: Name = Field(default="radix", description="prefix cache by name")
    max_blocks: int | None = Field(
        default=None, ge=1, description="most KV blocks that the cache keeps; null: all there are"
    )
    eviction_policy: Name = Field(default="lru", description="policy that chooses what is evicted, by name")
    eviction_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the eviction policy, as a YAML mapping"
    )


class SchedulerConfig(_Checked):
    """Who runs in a step, and how much."""

    section: ClassVar[str] = "scheduler"

    name: Name = Field(default="base", description="scheduler by name")
    passes: Names = Field(
        default=(), description="optimization passes by name, in order, separated by commas"
    )
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="most tokens computed in one step")
    max_num_seqs: int = Field(default=256, ge=1, description="most sequences that run at once")


class PredictorConfig(_Checked):
    """Who predicts how long an output becomes."""

    section: ClassVar[str] = "predictor"

    name: Name = Field(default="statistical", description="lifetime predictor by name")


class ForwardConfig(_Checked):
    """Who computes the forward pass."""

    section: ClassVar[str] = "forward"

    backend: Name = Field(default="torch", description="forward backend by name")
    attention: Name = Field(default="sdpa", description="attention backend by name")


class SamplingConfig(_Checked):
    """How tokens are chosen."""

    section: ClassVar[str] = "sampling"

    logits_processors: Names = Field(
        default=(),
        description="logits processors by name, after the built-in ones, in order, separated by commas",
    )


class ServerConfig(_Checked):
    """The HTTP server: where it listens, who may use it, how much it takes on."""

    section: ClassVar[str] = "server"

    host: Name = Field(default="127.0.0.1", description="address that is listened on")
    port: int = Field(default=8000, ge=0, le=65535, description="port that is listened on; 0: any free one")
    api_keys: Names = Field(
        default=(),
        repr=False,
        description="keys of those who may use the server, each a tenant; none: whoever reaches it",
    )
    allowed_hosts: Names = Field(
        default=(), description="names in the Host header that are answered, beside the address itself"
    )
    served_model_name: Names = Field(
        default=(), description="names of the model in the API, the first in answers; none: the model's own"
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="sequences that may wait beyond scheduler.max_num_seqs before the server says 429",
    )
    body_timeout: float = Field(
        default=10.0, gt=0, le=600, description="seconds in which a request's body has to arrive"
    )
    shutdown_timeout: float = Field(
        default=30.0, ge=0, le=86_400, description="seconds that running requests get at the end"
    )


class EngineConfig(_Checked):
    """Everything that an engine can be told at its start."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    kv: KVConfig = Field(default_factory=KVConfig)
    prefix_cache: PrefixCacheConfig = Field(default_factory=PrefixCacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    predictor: PredictorConfig = Field(default_factory=PredictorConfig)
    forward: ForwardConfig = Field(default_factory=ForwardConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)

    @classmethod
    def from_flat(cls, **values: Any) -> Self:
        """Build a configuration from flat names such as `block_size` (`settings.ALL_NAMES`).

        Raises ConfigError for an unknown name or a value that cannot be used.
        """
        return cls.from_values(flat_to_dotted(values, ALL_NAMES))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from dotted keys (`{"kv.block_size": 16}`); the rest are defaults."""
        return cls(**_nest(values.items()))

    def values(self) -> dict[str, Any]:
        """Return every setting under its dotted key, in the order of the schema."""
        return {
            f"{section}.{name}": value
            for section in type(self).model_fields
            for name, value in getattr(self, section)
        }

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a checked copy in which the settings under these dotted keys are replaced."""
        return type(self).from_values({**self.values(), **values})


SECTIONS: dict[str, type[_Checked]] = {
    kind.section: kind
    for kind in (
        ModelConfig,
        KVConfig,
        PrefixCacheConfig,
        SchedulerConfig,
        PredictorConfig,
        ForwardConfig,
        SamplingConfig,
        ServerConfig,
    )
}
"""Section name → its model."""


def flat_to_dotted(values: Mapping[str, Any], known: Mapping[str, str] = FLAT_NAMES) -> dict[str, Any]:
    """Rename flat names to dotted keys, by default an engine's. Raises ConfigError for an unknown one."""
    for name in values:
        if name not in known:
            listed = ", ".join(known)
            raise ConfigError(f"unknown setting {name!r}; settings: {listed}.{nearest(name, known)}")
    return {known[name]: value for name, value in values.items()}


def _nest(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in items:
        section, _, name = key.partition(".")
        if section not in SECTIONS:
            raise ConfigError(unknown_key(section, "", list(SECTIONS)))
        nested.setdefault(section, {})[name] = value
    return nested
