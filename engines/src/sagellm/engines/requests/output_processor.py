"""Turns sampled tokens into text, watches for stop strings, and tracks each request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sagellm.core import FinishReason, RequestId, Runtime, SequenceId, TokenOutput, get_logger
from sagellm.engines.logging import fields
from sagellm.engines.logprobs import Logprobs, PendingScores, PromptLogprobs
from sagellm.engines.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.sampling.rows import SampledToken
from sagellm.engines.sampling.stop import StopStringMatcher
from sagellm.engines.text.detokenizer import Decoders, IncrementalDetokenizer, TokenwiseDetokenizer
from sagellm.engines.text.guarded_tokenizer import is_foreign

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Continuation:
    """One sequence being turned into text."""

    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    matcher: StopStringMatcher | None
    pending: PendingScores | None  # if log-probabilities are reported


@dataclass(slots=True, eq=False)
class _Live:
    """A request with at least one unfinished sequence."""

    processed: QueuedRequest
    output: RequestOutput
    continuations: dict[SequenceId, _Continuation]
    num_open: int


class Processed(NamedTuple):
    """The outputs that a step changed, and the sequences to drop: ended by a stop string, or failed here."""

    changed: list[RequestOutput]
    stopped: list[SequenceId]
    failed: list[SequenceId]


class OutputProcessor:
    """Knows every live request and its sequences, but nothing about how they are computed."""

    def __init__(self, tokenizer: Tokenizer | None, runtime: Runtime) -> None:
        self._decoders = Decoders(tokenizer)
        self._clock = runtime.clock
        self._live: dict[RequestId, _Live] = {}
        self._owner: dict[SequenceId, RequestId] = {}

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    @property
    def request_ids(self) -> list[RequestId]:
        """The live requests."""
        return list(self._live)

    @property
    def requests(self) -> list[QueuedRequest]:
        """The live requests, as they were added."""
        return [live.processed for live in self._live.values()]

    def add(self, processed: QueuedRequest, prompt: str | None = None) -> None:
        """Start tracking a request whose prompt was this text."""
        request = processed.request
        continuations = {
            sequence_id: self._continuation(processed, index)
            for index, sequence_id in enumerate(processed.sequence_ids)
        }
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.token_ids.tolist(),
            outputs=[entry.output for entry in continuations.values()],
            metrics=RequestMetrics(arrival_ns=request.arrival_ns),
        )
        self._live[request.request_id] = _Live(processed, output, continuations, len(continuations))
        self._owner |= dict.fromkeys(continuations, request.request_id)

    def sequence_ids(self, request_id: RequestId) -> list[SequenceId]:
        """Return the sequences of a live request."""
        return list(self._live[request_id].continuations)

    def process(self, token_outputs: Iterable[TokenOutput]) -> Processed:
        """Process a step's outputs. If a token cannot become text, only its sequence ends."""
        now_ns = self._clock.now_ns()
        changed: dict[RequestId, RequestOutput] = {}
        stopped: list[SequenceId] = []
        failed: list[SequenceId] = []
        for token_output in token_outputs:
            request_id = self._owner.get(token_output.sequence_id)
            if request_id is None:
                continue
            live = self._live[request_id]
            try:
                if self._take(live, token_output, now_ns):
                    stopped.append(token_output.sequence_id)
            except BaseException as error:  # from the tokenizer
                if not is_foreign(error):
                    raise
                _log_failure(request_id, error)
                self._fail(live, token_output.sequence_id, error)
                failed.append(token_output.sequence_id)
            changed[request_id] = live.output
        return Processed(list(changed.values()), stopped, failed)

    def abort(self, request_id: RequestId) -> RequestOutput:
        """End a request and return its last state, without the end of its text if decoding fails."""
        live = self._live[request_id]
        for sequence_id, continuation in live.continuations.items():
            if continuation.output.finish_reason is not None:
                continue
            try:
                self._close(live, sequence_id, continuation, "abort", None)
            except BaseException as error:  # as in process
                if not is_foreign(error):
                    raise
                _log_failure(request_id, error)
                self._fail(live, sequence_id, error)
        return live.output

    def _take(self, live: _Live, token_output: TokenOutput, now_ns: int) -> bool:
        """Account for a run of tokens; return whether a stop string ended the sequence."""
        continuation = live.continuations[token_output.sequence_id]
        output, metrics = continuation.output, live.output.metrics
        if output.finish_reason is not None:
            return False
        reason: FinishReason | None = token_output.finish_reason
        stop_reason: int | str | None = token_output.stop_reason
        stopped_by_string = False
        if token_output.token_ids:
            if metrics.first_token_ns is None:
                metrics.first_token_ns = now_ns
            metrics.last_token_ns = now_ns
            if metrics.scheduled_ns is None:
                metrics.scheduled_ns = token_output.scheduled_ns
            if token_output.num_cached_tokens > live.output.num_cached_tokens:
                live.output.num_cached_tokens = token_output.num_cached_tokens
            if token_output.prompt_scores is not None and output.index == 0:
                decoders = self._decoders if live.processed.params.detokenize else Decoders(None)
                live.output.prompt_logprobs = PromptLogprobs(
                    live.output.prompt_token_ids, token_output.prompt_scores, decoders
                )
            num_before = len(output.token_ids)
            matched = self._take_tokens(live, continuation, token_output)
            num_tokens = len(output.token_ids)
            metrics.num_output_tokens += num_tokens - num_before
            if num_tokens > metrics.num_longest_output_tokens:
                metrics.num_longest_output_tokens = num_tokens
            if matched is not None:
                stopped_by_string = reason is None
                reason, stop_reason = "stop", matched
        output.error, output.is_refused = token_output.error, token_output.is_refused
        metrics.num_preemptions += token_output.num_preemptions
        metrics.num_draft_tokens += token_output.num_draft_tokens
        metrics.num_accepted_tokens += token_output.num_accepted_tokens
        if reason is not None:
            self._close(live, token_output.sequence_id, continuation, reason, stop_reason)
        return stopped_by_string

    def _fail(self, live: _Live, sequence_id: SequenceId, error: BaseException) -> None:
        continuation = live.continuations[sequence_id]
        continuation.detokenizer = None
        continuation.output.error = f"{type(error).__name__}: {error}"
        self._close(live, sequence_id, continuation, "error", None)

    def _take_tokens(self, live: _Live, continuation: _Continuation, token_output: TokenOutput) -> str | None:
        """Append tokens and their text, up to the stop string that ends them; return it."""
        params = live.processed.params
        logprobs = token_output.logprobs or repeat(None)
        last = len(token_output.token_ids) - 1
        if token_output.hidden_states is not None:
            _add_states(continuation.output, token_output.hidden_states, last + 1)
        for index, (token_id, scored) in enumerate(zip(token_output.token_ids, logprobs, strict=False)):
            continuation.output.token_ids.append(token_id)
            is_stop_token = token_output.finish_reason == "stop" and index == last
            is_left_out = is_stop_token and not params.include_stop_str_in_output
            if continuation.pending is not None:
                _add_score(continuation, token_id, scored, is_left_out=is_left_out)
            if continuation.detokenizer is None or is_left_out:
                continue
            text = continuation.detokenizer.append([token_id])
            if (matched := self._match(continuation, text, params.min_tokens)) is not None:
                if continuation.output.hidden_states is not None:
                    del continuation.output.hidden_states[len(continuation.output.token_ids) :]
                return matched
        _take_settled(continuation)
        return None

    def _match(self, continuation: _Continuation, text: str, min_tokens: int) -> str | None:
        if continuation.matcher is None:
            continuation.output.text += text
            return None
        may_stop = len(continuation.output.token_ids) > min_tokens
        emitted, matched = continuation.matcher.append(text, may_stop=may_stop)
        continuation.output.text += emitted
        return matched

    def _close(
        self,
        live: _Live,
        sequence_id: SequenceId,
        continuation: _Continuation,
        reason: FinishReason,
        stop_reason: int | str | None,
    ) -> None:
        output = continuation.output
        if continuation.detokenizer is not None and not isinstance(stop_reason, str):
            text = continuation.detokenizer.finish()
            matched = self._match(continuation, text, live.processed.params.min_tokens)
            if matched is not None:
                reason, stop_reason = "stop", matched
            elif continuation.matcher is not None:
                output.text += continuation.matcher.finish()
        elif continuation.detokenizer is not None and continuation.pending is not None:
            continuation.detokenizer.finish()  # the text is complete, what its last tokens add may not be
        _take_settled(continuation, is_finished=True)
        output.finish_reason, output.stop_reason = reason, stop_reason
        del self._owner[sequence_id]
        live.num_open -= 1
        if live.num_open == 0:
            live.output.finished = True
            live.output.metrics.finished_ns = self._clock.now_ns()
            del self._live[live.output.request_id]

    def _continuation(self, processed: QueuedRequest, index: int) -> _Continuation:
        params = processed.params
        is_scored = params.logprobs is not None
        output = CompletionOutput(
            index=index,
            logprobs=Logprobs() if is_scored else None,
            hidden_states=[] if params.return_hidden_states else None,
        )
        decoder = self._decoders.get(skip_special_tokens=params.skip_special_tokens)
        if decoder is None or not params.detokenize:
            return _Continuation(output, None, None, PendingScores(None) if is_scored else None)
        matcher = None
        if params.stop:
            matcher = StopStringMatcher(tuple(params.stop), include_stop=params.include_stop_str_in_output)
        if not is_scored:
            return _Continuation(output, IncrementalDetokenizer(decoder), matcher, None)
        detokenizer = TokenwiseDetokenizer(decoder)
        return _Continuation(output, detokenizer, matcher, PendingScores(detokenizer))


def _log_failure(request_id: RequestId, error: BaseException) -> None:
    shown = fields(request_id=request_id)
    logger.error("request %s ends with an error", request_id, exc_info=error, extra=shown)


def _add_score(
    continuation: _Continuation, token_id: int, scored: SampledToken | None, *, is_left_out: bool
) -> None:
    """Take a token's log-probabilities, before the token itself."""
    assert continuation.pending is not None, "they are reported"
    if scored is None or scored.logprob is None:
        continuation.pending.add((token_id,), (), None, is_left_out=is_left_out)
        return
    top = scored.top_logprobs or ()
    token_ids = [token_id, *(each for each, _ in top)]
    values = [scored.logprob, *(value for _, value in top)]
    continuation.pending.add(token_ids, values, scored.rank, is_left_out=is_left_out)
    output = continuation.output
    output.cumulative_logprob = (output.cumulative_logprob or 0.0) + scored.logprob


def _add_states(output: CompletionOutput, states: bytes, num_tokens: int) -> None:
    """Take the hidden states of a run of tokens, (num_tokens, hidden_size) float32."""
    if output.hidden_states is not None:
        output.hidden_states += list(np.frombuffer(states, np.float32).reshape(num_tokens, -1))


def _take_settled(continuation: _Continuation, *, is_finished: bool = False) -> None:
    """Add the log-probabilities whose texts have become known, all of them if the sequence has finished."""
    pending, logprobs = continuation.pending, continuation.output.logprobs
    if pending is None or logprobs is None:
        return
    for position in pending.finish() if is_finished else pending.settled():
        if position.values:
            logprobs.append(position)
