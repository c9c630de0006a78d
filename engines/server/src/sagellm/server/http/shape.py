"""Where the two endpoints differ: how a body becomes a job, and how outputs are written."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sagellm.core import EngineError
from sagellm.engines.requests.outputs import CompletionOutput, RequestOutput
from sagellm.engines.sampling.params import SamplingParams
from sagellm.server.http.errors import APIError, StructureRefusedError, deadline_exceeded
from sagellm.server.http.prompt_encoder import EncodedPrompt
from sagellm.server.http.reply import encode_json

if TYPE_CHECKING:
    from sagellm.server.http.answer_reading import AnswerReading


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One body, checked: prompts, sampling, and how the answer looks."""

    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    model: str
    is_streamed: bool
    num_choices: int  # per prompt; `params.n` are generated, and the likeliest of them are shown
    includes_usage: bool = False
    has_usage_in_chunks: bool = False
    echoes: bool = False
    returns_token_ids: bool = False
    hides_output: bool = False  # max_tokens was 0
    hides_logprobs: bool = False  # they serve only for ranking
    shows_tokens_as_ids: bool = False
    reading: AnswerReading | None = None  # how answers are taken apart
    structure_param: str = "tools"  # which parameter says what answers must match
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def request_ids(self) -> list[str]:
        """The ids of its requests in the engine, one per prompt."""
        return [f"{self.id}-{index}" for index in range(len(self.prompts))]

    def limits(self, max_model_len: int) -> list[tuple[int, int]]:
        """Return the number of continuations of each prompt, and the most tokens that each may have."""
        most = self.params.max_tokens or max_model_len
        lengths = (len(prompt.token_ids) for prompt in self.prompts)
        return [(self.params.n, max(1, min(most, max_model_len - each))) for each in lengths]

    def num_tokens(self, max_model_len: int) -> int:
        """Return the tokens of its prompts and all that may be generated for them."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        return num_prompt + sum(n * most for n, most in self.limits(max_model_len))


@dataclass(slots=True)
class Cursor:
    """How much of one continuation has been written."""

    prefix: bytes  # of each of its chunks, up to the new part
    prompt: EncodedPrompt
    num_characters: int = 0
    num_tokens: int = 0
    num_scored: int = 0
    offset: int = 0  # where the next token's text begins, for log-probabilities
    has_started: bool = False
    is_finished: bool = False


class Shape(ABC):
    """Writes the outputs of one job. `index` counts the continuations of all prompts."""

    object_name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, job: Job) -> None:
        self.job = job
        self._tail = b',"usage":null}\n\n' if job.includes_usage else b"}\n\n"

    def tail(self, cursor: Cursor, num_tokens: int) -> bytes:
        """Return the end of a chunk, after this many tokens of its continuation."""
        if not self.job.has_usage_in_chunks:
            return self._tail
        num_prompt = len(cursor.prompt.token_ids)
        if self.job.hides_output:
            num_tokens = 0
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            num_prompt,
            num_tokens,
            num_prompt + num_tokens,
        )

    @abstractmethod
    def choice(self, index: int, output: CompletionOutput, request: RequestOutput) -> Iterator[bytes]:
        """Yield a finished continuation, which has not failed, as it appears in a complete answer."""

    @abstractmethod
    def render(self, cursor: Cursor, output: CompletionOutput) -> bytes:
        """Return what is new in a continuation as events, or nothing. Called per token, so it is cheap."""

    def cursors(self) -> list[Cursor]:
        """Return a cursor for each continuation of each prompt, in order."""
        head = encode_json({**self._head(self.chunk_name), "choices": []}).removesuffix(b"]}")
        num = self.job.params.n
        return [
            Cursor(
                prefix=b'data: %b{"index":%d,' % (head, position * num + which),
                prompt=prompt,
            )
            for position, prompt in enumerate(self.job.prompts)
            for which in range(num)
        ]

    def parts(self, requests: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the complete answer as JSON, in parts: it may have 100 MB. Each takes little time.

        Raises EngineError or APIError for a continuation that failed, before the first part.
        """
        num = self.job.num_choices
        choices = [(request, output) for request in requests for output in likeliest(request.outputs, num)]
        for _, output in choices:
            raise_if_failed(output)
        head = encode_json({**self._head(self.object_name), "usage": usage(requests, self.job)})
        yield head.removesuffix(b"}") + b',"choices":['
        for index, (request, output) in enumerate(choices):
            yield b"," if index else b""
            yield from self.choice(index, output, request)
        yield b"]"
        yield from self.extras(requests)
        yield b"}"

    def extras(self, requests: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield the further members of a complete answer."""
        return iter(())

    def usage_event(self, requests: Sequence[RequestOutput]) -> bytes:
        """Return the last event of a stream that includes its usage."""
        value = {**self._head(self.chunk_name), "choices": [], "usage": usage(requests, self.job)}
        return b"data: %b\n\n" % encode_json(value)

    def _head(self, name: str) -> dict[str, Any]:
        job = self.job
        return {
            "id": f"{self.id_prefix}-{job.id}",
            "object": name,
            "created": job.created,
            "model": job.model,
        }


def likeliest(outputs: Sequence[CompletionOutput], num: int) -> Sequence[CompletionOutput]:
    """Return the `num` with the highest mean log-probability per token, best first; all stay in order."""
    if len(outputs) == num:
        return outputs
    for output in outputs:
        raise_if_failed(output)
    return sorted(outputs, key=_mean_logprob, reverse=True)[:num]


def _mean_logprob(output: CompletionOutput) -> float:
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))


def usage(requests: Sequence[RequestOutput], job: Job) -> dict[str, Any]:
    """Count tokens; a prompt counts once, however many continuations it has."""
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    outputs = [output for request in requests for output in request.outputs]
    num_output = 0 if job.hides_output else sum(len(output.token_ids) for output in outputs)
    counted: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_cached_tokens for request in requests)},
    }
    if num_drafts := sum(request.metrics.num_draft_tokens for request in requests):
        num_accepted = sum(request.metrics.num_accepted_tokens for request in requests)
        counted["completion_tokens_details"] = {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafts - num_accepted,
        }
    return counted


def end_of(output: CompletionOutput, told: str | None = None) -> bytes:
    """Return the end of a choice in a chunk: why it ended, or what is `told` instead, or that it continues.

    Raises EngineError, InvalidRequestError or APIError for a continuation that failed.
    """
    reason = output.finish_reason
    if reason is None:
        return b',"finish_reason":null}]'
    raise_if_failed(output)
    return b',"finish_reason":"%b","stop_reason":%b}]' % (
        (told or reason).encode(),
        encode_json(output.stop_reason),
    )


def raise_if_failed(output: CompletionOutput) -> None:
    """Raise for a continuation that was refused, ended with an error, was late or was aborted."""
    if output.finish_reason == "deadline":
        raise deadline_exceeded()
    if output.is_refused:
        raise StructureRefusedError(output.error or "the request was refused")
    if output.finish_reason == "error":
        raise EngineError(output.error or "a sequence failed")
    if output.finish_reason == "abort":
        raise APIError(503, "the request was aborted; send it again", code="aborted")


def hidden_states(output: CompletionOutput) -> Iterator[bytes]:
    """Yield the hidden states of a complete choice as its last member, if they were requested."""
    if output.hidden_states is None:
        return
    start = b',"hidden_states":['
    for state in output.hidden_states:
        yield start + encode_json(state.tolist())
        start = b","
    yield b"]" if output.hidden_states else start + b"]"
