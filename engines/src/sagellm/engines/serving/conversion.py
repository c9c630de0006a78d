"""Sequences as messages, and back."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import groupby

from sagellm.core import InvalidRequestError, Request, RequestLimits, TokenIds
from sagellm.engines.config.shown import shown
from sagellm.engines.core.sequence import Sequence
from sagellm.engines.request_checks import (
    check_names,
    check_params,
    check_room,
    check_token_ids,
    stop_token_ids,
)
from sagellm.engines.serving.messages import NewRequest


def make_requests(sequences: Seq[Sequence]) -> list[NewRequest]:
    """Write sequences as messages, one for those of a request that have their parameters in common."""
    groups = groupby(sequences, lambda each: (each.request.request_id, each.params))
    return [_make_request(list(group)) for _, group in groups]


def _make_request(sequences: list[Sequence]) -> NewRequest:
    first = sequences[0]
    request = first.request
    return NewRequest(
        request_id=request.request_id,
        token_ids=request.token_ids.data,
        max_tokens=request.max_tokens,
        priority=request.priority,
        arrival_ns=request.arrival_ns,
        namespace=request.namespace,
        params=first.params,
        stop_token_ids=first.stop_token_ids,
        sequences=[(sequence.sequence_id, sequence.seed) for sequence in sequences],
    )


def make_sequences(message: NewRequest, limits: RequestLimits) -> list[Sequence]:
    """Make the sequences of a message.

    Raises InvalidRequestError or InvalidInputError for a request that `InputProcessor` would have refused, so
    that no queued sequence fails in the middle of a step because of its parameters.
    """
    request = Request(
        request_id=message.request_id,
        token_ids=TokenIds(message.token_ids),
        max_tokens=message.max_tokens,
        priority=message.priority,
        arrival_ns=message.arrival_ns,
        namespace=message.namespace,
    )
    num_prompt = len(request.token_ids)
    check_names(request.request_id, request.namespace)
    check_token_ids(request.token_ids, limits)
    check_room(num_prompt, request.max_tokens, limits)
    check_params(message.params, limits)
    if num_prompt + request.max_tokens > limits.max_model_len:
        raise InvalidRequestError(
            f"{num_prompt} prompt tokens and {request.max_tokens} to generate are more than "
            f"{limits.max_model_len}"
        )
    if len(message.sequences) > message.params.n:
        raise InvalidRequestError(
            f"n is {message.params.n}, and there are {len(message.sequences)} sequences"
        )
    if unknown := message.stop_token_ids - stop_token_ids(message.params, limits):
        raise InvalidRequestError(
            f"stop token ids {shown(unknown)} are neither the request's nor the model's"
        )
    return [
        Sequence.of(
            request,
            sequence_id,
            params=message.params,
            seed=seed,
            stop_token_ids=message.stop_token_ids,
        )
        for sequence_id, seed in message.sequences
    ]
