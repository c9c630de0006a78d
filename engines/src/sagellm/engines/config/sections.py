"""The sections of an engine's configuration: frozen, keyword-only, one default each.

Every mistake is a ConfigError that names the key, the value and what is possible.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from sagellm.core import ConfigError, ProviderSpec
from sagellm.core.plugins.option_text import read_slots, read_value, split
from sagellm.core.protocols.scheduler_ir import STAGES
from sagellm.engines.config.explain import Aliases, explain
from sagellm.engines.embedded import EMBEDDED
from sagellm.engines.sizes import parse_bytes

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s,*?#@]+")
_SECRET = re.compile(r"[0-9a-fA-F]{32,}")
_MAX_SEED = 2**63 - 1
_SHORT_DTYPES = Aliases({"half": "float16", "float": "float32", "fp8": "float8_e4m3fn"})


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_names(value: object) -> object:
    """Also accept `a,b` and lists: a shell has no lists, and YAML has no tuples."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list) else value


def _as_size(value: object) -> object:
    try:
        parse_bytes(value, "it")
    except ConfigError:
        raise ValueError("bytes, as in 4GiB, 500MB or 1000000") from None
    return str(value)


def _as_dtype(value: object) -> object:
    """Accept torch's own dtypes, and vLLM's short names for some of them."""
    name = str(value).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def _as_providers(value: object) -> tuple[ProviderSpec, ...]:
    """Read `lru,qos{within=reuse}`, with or without brackets, or a list of such texts or of mappings."""
    items = split(value) if isinstance(value, str) else value
    return tuple(map(ProviderSpec.of, items if isinstance(items, list | tuple) else [items]))


def _as_tiers(value: object) -> tuple[ProviderSpec, ...]:
    """Read the tiers of `kv.tiers`, which may also be a mapping of names to sizes or options.

    Sizes become numbers of bytes. Raises ConfigError for a tier without a valid size, or named twice.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = read_value(value)
    if isinstance(value, Mapping) and "name" not in value:
        value = [
            {"name": name, "options": each if isinstance(each, Mapping) else {"max_bytes": each}}
            for name, each in value.items()
        ]
    tiers = tuple(map(_sized, _as_providers(value)))
    names = [each.name for each in tiers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"it names {twice[0]!r} twice; keep one")
    return tiers


def _as_sparsifier(value: object) -> ProviderSpec:
    """Read a provider, or the pattern of `magnitude` alone. Raises ConfigError for what YAML makes of it."""
    if isinstance(value, int):
        raise ConfigError(
            f"it is the number {value}; quote a pattern in YAML, as in '2:4', which is 124 to it"
        )
    if isinstance(value, str) and re.fullmatch(r"\d+:\d+", value):
        return ProviderSpec("magnitude", {"pattern": value})
    return ProviderSpec.of(value)


def _sized(tier: ProviderSpec) -> ProviderSpec:
    if "max_bytes" not in tier.options:
        raise ConfigError(
            f"the tier {tier.name!r} has no size; give its bytes, as in {{{tier.name}: 4GiB}}. "
            "`sage llm plugins list --kind kv_tier` shows what tiers there are"
        )
    max_bytes = parse_bytes(tier.options["max_bytes"], f"{tier.name}.max_bytes")
    return ProviderSpec(tier.name, {**tier.options, "max_bytes": max_bytes})


def provider(kind: str, default: str | tuple[()] | None, description: str) -> Any:
    """Declare a setting that names one provider of a kind, or any number if the default is ()."""
    spec = ProviderSpec(default) if isinstance(default, str) else default
    return Field(default=spec, description=description, json_schema_extra={"kind": kind})


Name = Annotated[str, Field(min_length=1)]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_as_dtype), _SHORT_DTYPES
]
KVDType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"],
    BeforeValidator(_as_dtype),
    _SHORT_DTYPES,
]
Size = Annotated[str, BeforeValidator(_as_size)]
PathOrName = Annotated[Name, BeforeValidator(_as_text)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_as_names)]
OneProvider = Annotated[ProviderSpec, BeforeValidator(ProviderSpec.of)]
Sparsity = Annotated[ProviderSpec, BeforeValidator(_as_sparsifier)]
Providers = Annotated[tuple[ProviderSpec, ...], BeforeValidator(_as_providers)]
Tiers = Annotated[tuple[ProviderSpec, ...], BeforeValidator(_as_tiers)]


class Checked(BaseModel):
    """A frozen model that refuses unknown keys and raises ConfigError, alone or inside another."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    section: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**self.with_own_options(values))
        except ValidationError as error:
            raise explain(error, type(self), self.section) from None

    @classmethod
    def with_own_options(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values, with `options` next to the `name` of a provider merged into it."""
        field = cls.model_fields.get("name")
        if "options" not in values or "options" in cls.model_fields or field is None:
            return dict(values)
        if not isinstance(field.default, ProviderSpec):
            return dict(values)
        given = dict(values)
        own = {"name": given.get("name", field.default.name), "options": given.pop("options")}
        return given | {"name": own}


class EngineKindConfig(Checked):
    """Which engine runs the model."""

    section: ClassVar[str] = "engine"

    name: OneProvider = provider("engine", "llm", "engine by name: llm is the one that comes with sageLLM")


class ModelConfig(Checked):
    """Which checkpoint is run, on what, and in which number format."""

    section: ClassVar[str] = "model"

    name: PathOrName = Field(
        default=EMBEDDED,
        description="model: a directory, a GGUF file, a hub id, or the one that ships with this package",
    )
    tokenizer: PathOrName | None = Field(
        default=None, description="tokenizer: a directory or a hub id, if not the model's own"
    )
    revision: Name | None = Field(default=None, description="branch, tag or commit of a hub id")
    dtype: DType = Field(
        default="auto", description="number format of weights and KV: auto, float32, bfloat16 or float16"
    )
    device: str = Field(default="auto", description="where the model runs: auto, cpu, cuda or cuda:N")
    quantization: OneProvider | None = provider(
        "quantizer", None, "quantizer that the weights go through at loading"
    )
    activations: Literal["int8"] | None = Field(
        default=None,
        description="int8: activations are rounded to 8 bits where weights are stored as integers, which is "
        "faster on CPUs; null: as the checkpoint says",
    )
    sparsity: Sparsity | None = provider(
        "sparsifier", None, "sparsifier that prunes the layers' weights at loading, or a pattern such as 2:4"
    )
    packed_cache: PathOrName | None = Field(
        default=None,
        description="folder that keeps packed weights, so that later loads only map them; null: none",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,  # a token of the prompt and one of the output
        description="longest prompt and output together, in tokens; null: the model's own",
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


class KVConfig(Checked):
    """How KV memory is cut into blocks."""

    section: ClassVar[str] = "kv"

    block_size: int = Field(default=16, ge=1, le=1024, description="tokens in a KV block")
    num_blocks: int | None = Field(
        default=None,
        ge=1,
        description="KV blocks; null: what memory allows, at most max_num_seqs of the longest sequences",
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the free memory for KV; null: 0.9 on a GPU, 0.5 on a CPU",
    )
    dtype: KVDType = Field(
        default="auto",
        description="number format of KV: auto (that of the model), float32, bfloat16, float16, int8 or fp8",
    )
    pool: OneProvider = provider("kv_pool", "paged", "KV pool by name")
    allocator: OneProvider = provider(
        "kv_allocator", "free_list", "allocator of KV blocks by name: free_list, buddy"
    )
    tiers: Tiers = provider(
        "kv_tier",
        (),
        "tiers for evicted KV, the fastest first, as in {host: 4GiB, file: {max_bytes: 20GiB}}",
    )
    fetch: Literal["cheaper", "always", "never"] = Field(
        default="cheaper",
        description="whether KV comes back from a tier: cheaper (than computing it), always or never",
    )
    store_key: PathOrName | None = Field(
        default=None,
        repr=False,  # it may hold the key itself by mistake
        description="file with the key that seals KV in files and servers, or env:NAME of a variable; "
        "null: kv.key in the runtime folder",
    )
    save_folder: PathOrName | None = Field(
        default=None, description="folder of `cache save` and `load`; null: sagellm/kv among the user's data"
    )
    max_saved: Size = Field(default="64GiB", description="most bytes of all saves together, as in 64GiB")

    @field_validator("store_key")
    @classmethod
    def _check_store_key(cls, value: str | None) -> str | None:
        if value is not None and _SECRET.fullmatch(value):
            raise ValueError("the path of a file with the key, or env:NAME, not the key itself")
        return value


class PrefixCacheConfig(Checked):
    """Reuse of KV between requests that begin alike."""

    section: ClassVar[str] = "prefix_cache"

    enabled: bool = Field(default=True, description="reuse the KV of prompts that begin alike")
    name: OneProvider = provider("prefix_cache", "radix", "prefix cache by name")
    max_blocks: int | None = Field(
        default=None, ge=1, description="most KV blocks that the cache keeps; null: all there are"
    )
    shadow: Providers = provider(
        "eviction_policy",
        (),
        "policies that run beside it without KV, separated by commas, to see what each would have saved",
    )
    shadow_sample: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the blocks that shadows simulate; below 1 they estimate",
    )
    eviction_policy: OneProvider = provider(
        "eviction_policy", "reuse", "policy that chooses what is evicted, by name"
    )


class SchedulerConfig(Checked):
    """Who runs in a step, and how much."""

    section: ClassVar[str] = "scheduler"

    name: OneProvider = provider("scheduler", "base", "scheduler by name")
    order: OneProvider | None = provider(
        "scheduler_pass", "shortest", "pass that orders admission; null: by priority, then arrival"
    )
    share: OneProvider | None = provider(
        "scheduler_pass", "fair-share", "pass that shares the engine between tenants; null: none"
    )
    preempt: OneProvider | None = provider(
        "scheduler_pass", None, "pass that chooses who is preempted; null: the lowest priority, the latest"
    )
    chunk: OneProvider | None = provider(
        "scheduler_pass", "chunked-prefill", "pass that cuts long prompts; null: none"
    )
    passes: Providers = provider(
        "scheduler_pass",
        (),
        "more passes by name, after order and before share, separated by commas; "
        "order=NAME, share=NAME, preempt=NAME and chunk=NAME name those",
    )
    print: Literal["none", "changed", "ir"] = Field(
        default="none",
        description="what passes do, on standard error: changed (each decision), "
        "ir (the whole schedule after each pass) or none",
    )
    step_target_ms: float | None = Field(
        default=None,
        gt=0,
        le=600_000,
        description="milliseconds that a step may take while others decode or wait; "
        "null: 250 on a CPU, 50 on a GPU, eight times that in Python's `generate`",
    )
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="most tokens computed in one step")
    max_num_seqs: int = Field(default=256, ge=1, description="most sequences that run at once")

    @property
    def pipeline(self) -> tuple[ProviderSpec, ...]:
        """All passes in the order in which they run."""
        stages = (self.order, *self.passes, self.share, self.preempt, self.chunk)
        return tuple(spec for spec in stages if spec is not None)

    @classmethod
    def with_own_options(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Also read `order=priority,share=none` among the passes, and "none" as no pass."""
        given = super().with_own_options(values)
        if "passes" in given:
            given |= read_slots(given["passes"], f"{cls.section}.passes", STAGES)
        return given | {stage: None for stage in STAGES if given.get(stage) == "none"}


class PredictorConfig(Checked):
    """Who predicts how long an output becomes."""

    section: ClassVar[str] = "predictor"

    name: OneProvider = provider("lifetime_predictor", "statistical", "lifetime predictor by name")


class SpeculationConfig(Checked):
    """Who drafts tokens that a step then verifies. The output is the same without."""

    section: ClassVar[str] = "speculation"

    proposer: OneProvider | None = provider(
        "draft_proposer", None, "draft proposer by name: ngram, suffix; null: no drafts"
    )
    adaptive: bool = Field(
        default=True,
        description="draft as many tokens as pay, by what was accepted and what steps took; false: always "
        "as many as the proposer has, at most 16",
    )


class ForwardConfig(Checked):
    """Who computes the forward pass."""

    section: ClassVar[str] = "forward"

    backend: OneProvider = provider(
        "forward_backend",
        "auto",
        "forward backend by name; auto: the first installed one that can run the model",
    )
    attention: OneProvider = provider("attention_backend", "sdpa", "attention backend by name")
    executor: OneProvider = provider("executor", "inline", "where steps are computed, by name")
    deterministic: bool = Field(
        default=False,
        description="give each request the same bits alone and beside others; "
        "only backends that do so are taken",
    )


class SamplingConfig(Checked):
    """How tokens are chosen."""

    section: ClassVar[str] = "sampling"

    logits_processors: Providers = provider(
        "logits_processor",
        (),
        "logits processors by name, after the built-in ones, in order, separated by commas",
    )


class GrammarConfig(Checked):
    """Who says which tokens may follow in a structured output."""

    section: ClassVar[str] = "grammar"

    name: OneProvider = provider(
        "grammar", "xgrammar", "who compiles what structured outputs must match, by name"
    )


class TraceConfig(Checked):
    """What is recorded of steps and requests."""

    section: ClassVar[str] = "trace"

    file: PathOrName | None = Field(
        default=None,
        description="file for a trace of steps and requests in Chrome's format; "
        "an existing one is overwritten",
    )
    profile: bool = Field(
        default=False,
        description="when the engine ends, print on standard error where the time of its steps went, by "
        "operation, and how close each came to the machine's limits",
    )


class RecordingConfig(Checked):
    """Whether requests are recorded as a trace that can be replayed."""

    section: ClassVar[str] = "recording"

    file: PathOrName | None = Field(
        default=None,
        description="file that gets a line for each finished request: salted hashes of its blocks, lengths "
        "and times, no text; one that exists is kept as FILE.1",
    )
    text: bool = Field(
        default=False,
        description="record the tokens of prompts and answers too, which are their text",
    )
    folder: PathOrName | None = Field(
        default=None,
        description="folder of `engine record start`; null: sagellm/recordings among the user's data",
    )
    max_file_size: Size = Field(
        default="256MiB", description="bytes after which the file is renamed FILE.1, as in 256MiB"
    )
    max_files: int = Field(
        default=4, ge=2, le=1000, description="most files of one name; the oldest is removed for a new one"
    )


class CommConfig(Checked):
    """The machine and how its parts are connected."""

    section: ClassVar[str] = "comm"

    topology: OneProvider = provider(
        "topology", "local", "topology reader by name: finds out what this machine has"
    )


class ServerConfig(Checked):
    """The HTTP server: where it listens, who may use it, how much it takes on."""

    section: ClassVar[str] = "server"

    host: Name = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    api_keys: Names = Field(
        default=(),
        repr=False,
        description="API keys, each a separate tenant, with options: KEY name=NAME weight=2 trusted "
        "max_requests=8 max_tokens=100000; empty disables authentication. All users of the "
        "machine can see flags; SAGELLM_API_KEY and server.api_key_file stay private",
    )
    api_key_file: PathOrName | None = Field(
        default=None,
        description="file with more API keys and their options, one key per line (# begins a comment), "
        "readable only by its owner",
    )
    allowed_hosts: Names = Field(
        default=(), description="values of the Host header that are accepted besides the address itself"
    )
    allowed_origins: Names = Field(
        default=(),
        description="origins whose pages may use the server from a browser, such as https://ui.example; "
        "* allows all",
    )
    metrics_allow: Names = Field(
        default=(),
        description="addresses and networks, such as 10.0.0.5 or 10.0.0.0/8, that read /metrics without a "
        "key where keys are set; not for requests that a proxy has marked, so not 127.0.0.1 behind one here",
    )
    public_namespaces: Names = Field(
        default=(), description="namespaces in which all who name one in cache_namespace share prefixes"
    )
    served_model_name: Names = Field(
        default=(), description="names of the model in the API, the first in answers; none: the model's own"
    )
    tool_parser: OneProvider = provider(
        "tool_parser",
        "auto",
        "tool parser by name: finds tool calls in answers; auto: the one that fits the chat template",
    )
    reasoning_parser: OneProvider = provider(
        "reasoning_parser",
        "auto",
        "reasoning parser by name: splits reasoning from answers; auto: the one that fits the chat template, "
        "null: none",
    )
    lenient: bool = Field(
        default=False,
        description="ignore unknown fields of requests, and list them in the header X-Sagellm-Ignored, "
        "instead of refusing them",
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="sequences that may wait beyond scheduler.max_num_seqs before the server answers 429",
    )
    max_requests_per_key: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="live sequences that a key without max_requests may have before it gets 429; null: with "
        "several keys as many as it leaves free, with one all",
    )
    max_tokens_per_key: int | None = Field(
        default=None,
        ge=1,
        le=1 << 40,
        description="tokens that the live requests of a key without max_tokens may have, with those to "
        "generate, before it gets 429; null: no limit",
    )
    deadline_ms: int | None = Field(
        default=3_600_000,
        ge=1,
        le=86_400_000,
        description="milliseconds that a request which gives no deadline_ms may take until its answer is "
        "complete, before it gets 504; null: no limit",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="most open connections; at the limit the longest idle one is closed for a new one, and "
        "if none is idle, the new one gets 503",
    )
    max_connections_per_peer: int = Field(
        default=2048,
        ge=1,
        le=1_000_000,
        description="most open connections from one address (IPv6: one /64 network); the same with 429",
    )
    body_timeout: float = Field(
        default=10.0, gt=0, le=600, description="seconds in which a request's body has to arrive"
    )
    body_stall_timeout: float = Field(
        default=5.0, gt=0, le=600, description="longest pause within a request's body, in seconds"
    )
    encoding_timeout: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="seconds that the model's chat template and tokenizer may take for one request",
    )
    shutdown_timeout: float = Field(
        default=30.0, ge=0, le=86_400, description="seconds that running requests have to end at shutdown"
    )
    frozen_after_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="seconds without progress, even inside a step, after which the engine's process is "
        "restarted; 0: never",
    )
    access_log: bool = Field(
        default=True, description="log one line per request: method, path, status, tokens, time"
    )
    log_format: Literal["plain", "json"] | None = Field(
        default=None,
        description="how log records are written: plain, or json, an object per line; null: as "
        "SAGELLM_LOG_FORMAT says, else plain",
    )
    otlp_traces_endpoint: Name | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318, that "
        "gets a span for each request; needs the extra otel. null: what OTEL_EXPORTER_OTLP_TRACES_ENDPOINT "
        "or OTEL_EXPORTER_OTLP_ENDPOINT says, else none",
    )

    @field_validator("metrics_allow")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for each in value:
                ip_network(each)
        except ValueError:
            raise ValueError("addresses or networks, such as 127.0.0.1, ::1 or 10.0.0.0/8") from None
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in value):
            raise ValueError("* or origins as browsers send them, scheme://host or scheme://host:port")
        return value
