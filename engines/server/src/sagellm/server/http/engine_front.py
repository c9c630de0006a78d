"""The interface that the server needs from an engine, which AsyncLLMEngine and RemoteEngine have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

from sagellm.core import EngineMetrics
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.requests.input_processor import Prompt, RequestOptions
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer


class Stream(Protocol):
    """The outputs of one request, each cumulative and possibly the same growing object.

    Iterating ends after the last output. It raises EngineDeadError when the engine's process is gone
    and EngineError for any other failure of the engine as a whole.
    """

    def __aiter__(self) -> Stream: ...

    async def __anext__(self) -> RequestOutput: ...

    def close(self) -> None:
        """Abort the request unless it has ended; readers get no further output. Never blocks."""


class EngineFront(Protocol):
    """Takes requests, only from the server's event loop.

    `add_job` keeps nothing if it raises InvalidRequestError. `metrics` answers between two steps, which
    may take long; `is_responsive` says at any time whether the engine is alive.
    """

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if it has none."""

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none."""

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values chosen for "auto"."""

    @property
    def model_name(self) -> str:
        """The name under which the engine loaded the model."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""

    @property
    def is_ready(self) -> bool:
        """Whether a request would run now."""

    @property
    def is_responsive(self) -> bool:
        """Whether the engine has made progress within the last 4 s, even inside a long step. Never waits."""

    @property
    def status(self) -> str:
        """What the engine does, in a word or two: "ready", or why it is not. Never waits."""

    @property
    def pause_s(self) -> float:
        """Seconds for which requests are refused, until the engine is started again; 0 at most times."""

    @property
    def num_restarts(self) -> int:
        """How often the engine was restarted because it had ended or made no progress."""

    async def add_job(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        request_ids: Sequence[str | None] = (),
        **options: Unpack[RequestOptions],
    ) -> Sequence[Stream]:
        """Queue requests with the same parameters and options. Raises InvalidRequestError, EngineError."""

    async def metrics(self) -> EngineMetrics:
        """Return a snapshot, between two steps."""
