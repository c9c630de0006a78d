"""Asks lifetime predictors about the requests of a trace, each with what was known when it arrived."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sagellm.core import (
    LifetimePrediction,
    LifetimePredictorProtocol,
    Namespace,
    PluginRegistry,
    PredictionRequest,
    TokenIds,
    TraceRequest,
    VirtualClock,
)
from sagellm.core.protocols.prefix_cache import PrefixAnswers, PrefixCacheProtocol
from sagellm.lab.simulation.prompts import prompt_tokens

SECONDS_PER_TOKEN = 0.02
"""How long requests are taken to run where a trace does not say."""

NO_LIMIT = 1 << 17
"""The limit of an output, in tokens, where the trace names none."""

_MAX_BLOCKS = 1 << 24
_BLOCK_TOKENS = 16  # where a trace has no blocks of its own


class Question(NamedTuple):
    """A request arrives. Predictors do not see `actual_length`, by which their answers are scored."""

    request: PredictionRequest
    actual_length: int


class Ending(NamedTuple):
    """The output of an earlier request has ended."""

    sequence_id: str
    length: int
    seconds: float


def questions(requests: Sequence[TraceRequest]) -> Iterator[Question | Ending]:
    """Yield what a predictor is asked and told about a trace, by time; the requests are sorted by arrival.

    A request runs `SECONDS_PER_TOKEN` for each token of its output, or as long as the trace says, and waits
    for nothing. What the prefix cache knows of earlier answers comes from a cache that never evicts. Outputs
    that were cut at their limit teach as little as in an engine.
    """
    clock = VirtualClock()
    block_tokens = next((one.block_tokens for one in requests if one.block_tokens), _BLOCK_TOKENS)
    cache: PrefixCacheProtocol = PluginRegistry.load().make(
        "prefix_cache", "radix", _MAX_BLOCKS, block_tokens, clock=clock
    )
    num_blocks = 0
    running: list[tuple[float, int]] = []
    first_s = requests[0].arrival_s if requests else 0.0

    def end() -> Ending:
        nonlocal num_blocks
        ended_s, index = heapq.heappop(running)
        one = requests[index]
        if _has_content(one):
            _move_to(clock, ended_s - first_s)
            tokens, namespace = prompt_tokens(one)[: one.num_prompt_tokens], _namespace(one)
            num_new = len(tokens) // block_tokens
            if num_new:
                cache.insert_prefix(tokens, range(num_blocks, num_blocks + num_new), namespace)
                num_blocks += num_new
                if one.finish_reason != "length":
                    cache.record_answer(tokens, one.num_output_tokens, namespace)
        return Ending(str(index), one.num_output_tokens, ended_s - one.arrival_s)

    for index, one in enumerate(requests):
        while running and running[0][0] <= one.arrival_s:
            yield end()
        _move_to(clock, one.arrival_s - first_s)
        answers: tuple[PrefixAnswers, ...] = ()
        if _has_content(one):
            answers = cache.answers(prompt_tokens(one)[: one.num_prompt_tokens], _namespace(one))
        tokens = one.token_ids if len(one.token_ids) else TokenIds(bytes(4 * one.num_prompt_tokens))
        asked = PredictionRequest(
            sequence_id=str(index),
            token_ids=tokens,
            max_length=one.max_tokens or NO_LIMIT,
            tenant=one.tenant,
            answers=answers,
            arrival_ns=clock.now_ns(),
        )
        yield Question(asked, one.num_output_tokens)
        heapq.heappush(running, (one.arrival_s + one.num_output_tokens * SECONDS_PER_TOKEN, index))
    while running:
        yield end()


def predictions(
    predictor: LifetimePredictorProtocol, requests: Sequence[TraceRequest]
) -> Iterator[tuple[Question, LifetimePrediction]]:
    """Ask a predictor about each request of a trace, and tell it of those that ended before."""
    for event in questions(requests):
        if isinstance(event, Question):
            yield event, predictor.predict(event.request)
        else:
            predictor.update(
                sequence_id=event.sequence_id, actual_length=event.length, actual_time=event.seconds
            )


def _has_content(one: TraceRequest) -> bool:
    return bool(one.block_ids) or len(one.token_ids) > 0


def _namespace(one: TraceRequest) -> Namespace:
    return Namespace(tenant=one.tenant or "default")


def _move_to(clock: VirtualClock, seconds: float) -> None:
    clock.sleep_ns(max(0, round(seconds * 1e9) - clock.now_ns()))
