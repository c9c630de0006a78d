"""Sequences as messages, and back."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import groupby

from sagellm.core import Request, TokenIds
from sagellm.engines.core.sequence import Sequence
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


def make_sequences(message: NewRequest) -> list[Sequence]:
    """Make the sequences that a message stands for."""
    request = Request(
        request_id=message.request_id,
        token_ids=TokenIds(message.token_ids),
        max_tokens=message.max_tokens,
        priority=message.priority,
        arrival_ns=message.arrival_ns,
        namespace=message.namespace,
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
