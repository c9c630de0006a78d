"""The load on a server: every setting of `bench serve`, with its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sagellm.core import ConfigError
from sagellm.lab.bench.figures import Limits
from sagellm.lab.bench.workloads import WorkloadSettings
from sagellm.lab.traces.lengths import DEFAULT_INPUT, DEFAULT_OUTPUT, Lengths

Endpoint = Literal["completions", "chat"]
PromptForm = Literal["auto", "ids", "text"]

PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """Where requests go, what they are, and when they come.

    With a concurrency and neither rate nor trace the loop is closed: that many callers each wait for their
    answer. With a rate or trace, the concurrency is a limit. Without any of the three, all are sent at once.
    """

    base_url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    endpoint: Endpoint = "completions"
    num_prompts: int | None = None  # 100, or the whole trace
    input_len: Lengths = DEFAULT_INPUT
    output_len: Lengths = DEFAULT_OUTPUT
    prompt_form: PromptForm = "auto"
    vocab_size: int = 4000
    prefix_share: float = 0.0
    num_prefixes: int = 1
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    workload: str | None = None
    trace: Path | None = None
    trace_format: str | None = None
    trace_speed: float = 1.0
    max_len: int | None = None
    warmup: int = 1
    seed: int = 0
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    goodput: Limits | None = None

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "concurrency": 1, "max_len": 2, "warmup": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"{name} is {value}; it must be at least {smallest}")
        for name in ("trace_speed", "timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.trace is not None and self.rate is not None:
            raise ConfigError("a trace sets when requests come; give --trace-speed instead of --rate")
        if self.workload is not None:
            WorkloadSettings(name=self.workload, vocab_size=self.vocab_size)  # checks the name
            if self.trace is not None:
                raise ConfigError("a trace is a load of its own; leave --workload or --trace out")
        if self.prompt_form == "ids" and self.endpoint == "chat":
            raise ConfigError("chat takes no token ids; use --endpoint completions, or prompts as text")

    @property
    def as_ids(self) -> bool:
        """Whether prompts are sent as token ids."""
        return self.endpoint == "completions" if self.prompt_form == "auto" else self.prompt_form == "ids"

    @property
    def is_closed_loop(self) -> bool:
        """Whether callers wait for their answers before they send again."""
        return self.concurrency is not None and self.rate is None and self.trace is None

    def shown(self) -> dict[str, Any]:
        """Return what a result may keep: everything but the key."""
        kept = {name: value for name, value in asdict(self).items() if name != "api_key"}
        lengths = {"input_len": str(self.input_len), "output_len": str(self.output_len)}
        return kept | lengths | {"trace": None if self.trace is None else self.trace.name}
