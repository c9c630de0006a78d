"""Drives requests over one engine client: prompts in, sequences to the engine, its tokens back as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sagellm.core import DuplicateRequestError, RequestId, Runtime, TokenOutput, UnknownRequestError
from sagellm.core.protocols.engine import RequestLimits
from sagellm.engines.engine_client import EngineClient
from sagellm.engines.requests.input_processor import InputProcessor
from sagellm.engines.requests.output_processor import OutputProcessor
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.requests.prompts import Prompt, text_of
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer


class RequestDriver:
    """Every live request of one engine, from its prompt to its last output.

    `LLMEngine`, `AsyncLLMEngine` and `RemoteEngine` are shells around it: they choose the thread that calls
    it and wait for the engine's tokens. Call `begin` first, and again after the engine was restarted. All
    calls come from one thread; only `input` may be used on another.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, runtime: Runtime) -> None:
        self._client, self._tokenizer, self._runtime = client, tokenizer, runtime
        self._input: InputProcessor | None = None
        self._output = OutputProcessor(tokenizer, runtime)

    def begin(self, limits: RequestLimits, default_params: SamplingParams) -> None:
        """Accept requests within an engine's limits; those without parameters get `default_params`."""
        self._input = InputProcessor(self._tokenizer, limits, self._runtime, default_params)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._output

    def __len__(self) -> int:
        return len(self._output)

    @property
    def live_requests(self) -> list[QueuedRequest]:
        """The live requests, as they were queued."""
        return self._output.requests

    @property
    def input(self) -> InputProcessor:
        """The processor that checks and tokenizes."""
        assert self._input is not None, "begin is called first"
        return self._input

    def check_unused(self, requests: Sequence[QueuedRequest]) -> None:
        """Raise DuplicateRequestError if a live request has the id of one of these."""
        for request in requests:
            if request.request_id in self._output:
                raise DuplicateRequestError(
                    f"request id {request.request_id!r} is in use; give another one or none"
                )

    def add(self, requests: Sequence[QueuedRequest], prompts: Sequence[Prompt]) -> None:
        """Queue processed requests with the same parameters, at least one.

        If the engine refuses one, its error is raised and nothing is kept. Raises DuplicateRequestError.
        """
        added: list[QueuedRequest] = []
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                self.check_unused([request])  # also against those before it
                self._output.add(request, text_of(prompt))
                added.append(request)
            self._client.add(requests)
        except BaseException:
            for request in added:
                self._output.abort(request.request_id)
            self._client.abort([each for request in added for each in request.sequence_ids])
            raise

    def take(self, token_outputs: Sequence[TokenOutput]) -> list[RequestOutput]:
        """Process a step's outputs; return the cumulative outputs of requests that got tokens or ended.

        The same objects grow from step to step.
        """
        processed = self._output.process(token_outputs)
        if processed.stopped:
            self._client.abort(processed.stopped, finish_reason="stop")
        if processed.failed:
            self._client.abort(processed.failed, finish_reason="error")
        return processed.changed

    def abort(self, request_id: str) -> RequestOutput:
        """End a request and return its output so far. Raises UnknownRequestError if it is not live."""
        live_id = RequestId(request_id)
        if live_id not in self._output:
            raise UnknownRequestError(f"no live request has the id {request_id!r}")
        self._client.abort(self._output.sequence_ids(live_id))
        return self._output.abort(live_id)

    def forget_all(self) -> None:
        """End every request, because the engine is gone."""
        for request_id in self._output.request_ids:
            self._output.abort(request_id)
