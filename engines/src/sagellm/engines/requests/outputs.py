"""What callers get: the cumulative text, tokens and measurements of a request."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sagellm.core import FinishReason, RequestId
from sagellm.engines.logprobs import Logprobs, PromptLogprobs
from sagellm.engines.metrics.latency import tpot_s, ttft_s

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of the prompt. `text` and `token_ids` hold everything so far.

    `logprobs` has a mapping per token, with the sampled one and the most likely ones, if the request asked
    for them; until the output is finished, the last tokens lack one while their text is not known, as when a
    character is incomplete. `hidden_states` has one (hidden_size,) for each token, if the request asked for
    them: what the head was given where the token was drawn. `stop_reason` is the stop token id or stop string
    that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None
    hidden_states: list[npt.NDArray[np.float32]] | None = field(default=None, compare=False)
    error: str | None = None  # what went wrong, when finish_reason is "error"
    is_refused: bool = False  # whether that is the request's own fault, as a schema that cannot be compiled


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in nanoseconds of the engine's clock.

    Figures are None until the events they measure have happened.
    """

    arrival_ns: int
    scheduled_ns: int | None = None  # start of the first step that computed any of the prompt
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finished_ns: int | None = None
    num_output_tokens: int = 0  # of all continuations
    num_longest_output_tokens: int = 0  # tokens of the longest continuation
    num_preemptions: int = 0  # of all continuations that have ended
    num_draft_tokens: int = 0  # verified, of all continuations
    num_accepted_tokens: int = 0  # of those

    @property
    def queue_time(self) -> float | None:
        """Arrival → first scheduled, in seconds."""
        return _seconds(self.arrival_ns, self.scheduled_ns)

    @property
    def prefill_time(self) -> float | None:
        """First scheduled → first output token, in seconds."""
        return _seconds(self.scheduled_ns, self.first_token_ns)

    @property
    def decode_time(self) -> float | None:
        """First → last output token, in seconds."""
        return _seconds(self.first_token_ns, self.last_token_ns)

    @property
    def inference_time(self) -> float | None:
        """First scheduled → last output token, in seconds."""
        return _seconds(self.scheduled_ns, self.last_token_ns)

    @property
    def ttft(self) -> float | None:
        """Time to first token: arrival → first output token, in seconds."""
        return None if self.first_token_ns is None else ttft_s(self.arrival_ns, self.first_token_ns)

    @property
    def tpot(self) -> float | None:
        """Time per output token: (last - first token) ÷ (output tokens - 1), in seconds.

        Continuations grow in parallel, so the tokens are those of the longest.
        """
        if self.first_token_ns is None or self.last_token_ns is None:
            return None
        return tpot_s(self.first_token_ns, self.last_token_ns, self.num_longest_output_tokens)

    @property
    def total_time(self) -> float | None:
        """Arrival → end, in seconds."""
        return None if self.finished_ns is None else (self.finished_ns - self.arrival_ns) / 1e9

    @property
    def throughput(self) -> float | None:
        """Output tokens ÷ total time, in tokens per second."""
        return self.num_output_tokens / self.total_time if self.total_time else None


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The state of a request after a step, or at its end.

    `prompt_logprobs`, if requested, are present from the first output token on, with an entry per prompt
    token: None for the first, which follows nothing, else the token and the most likely ones.
    """

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens whose KV was reused, the maximum over continuations
    prompt_logprobs: PromptLogprobs | None = None

    def snapshot(self) -> RequestOutput:
        """Return a copy that later steps do not change."""
        outputs = [
            replace(
                output,
                token_ids=output.token_ids.copy(),
                logprobs=None if output.logprobs is None else output.logprobs.snapshot(),
                hidden_states=None if output.hidden_states is None else output.hidden_states.copy(),
            )
            for output in self.outputs
        ]
        return replace(self, outputs=outputs, metrics=copy(self.metrics))
