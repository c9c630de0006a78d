"""Checks of a request against the model's limits, run where it is created and again in the core's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sagellm.core import InvalidRequestError, Namespace, Tenant, TokenIds, nearest
from sagellm.core.protocols.engine import RequestLimits
from sagellm.engines.config.shown import shown
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.engines.sampling.params import SamplingParams

MAX_NAME_CHARACTERS = 1024
"""Longest request id, longest name of a tenant, and longest part of a namespace."""

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Of tenants."""

MAX_DEADLINE_MS = 86_400_000


def check_names(request_id: str, namespace: Namespace, tenant: Tenant) -> None:
    """Raise InvalidRequestError for names that are empty, too long or not Unicode text."""
    for name, text, least in (
        ("request_id", request_id, 1),
        ("tenant.name", tenant.name, 1),
        *((f"namespace.{name}", text, 0) for name, text in zip(namespace._fields, namespace, strict=True)),
    ):
        if not least <= len(text) <= MAX_NAME_CHARACTERS or not _is_unicode(text):
            raise InvalidRequestError(
                f"{name} is {shown(text)}; it must be Unicode text of {least} to {MAX_NAME_CHARACTERS} "
                f"characters"
            )


def check_priority(priority: object) -> None:
    """Raise InvalidRequestError unless it is a 32-bit integer: priorities are sorted as columns."""
    is_integer = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_integer or not -(1 << 31) <= priority < 1 << 31:  # type: ignore[operator]
        raise InvalidRequestError(
            f"priority is {shown(priority)}; it must be an integer from -2147483648 to 2147483647, larger is "
            "more urgent"
        )


def check_weight(weight: object) -> None:
    """Raise InvalidRequestError unless it is a tenant's weight; NaN is none."""
    if not isinstance(weight, int | float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidRequestError(
            f"tenant.weight is {shown(weight)}; it must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        )


def check_deadline_ms(deadline_ms: object) -> None:
    """Raise InvalidRequestError unless it is None or a positive number of milliseconds, at most a day."""
    is_number = isinstance(deadline_ms, int | float) and not isinstance(deadline_ms, bool)
    if deadline_ms is not None and not (is_number and 0 < deadline_ms <= MAX_DEADLINE_MS):  # type: ignore[operator]
        raise InvalidRequestError(
            f"deadline_ms is {shown(deadline_ms)}; it must be None or milliseconds above 0 and at most "
            f"{MAX_DEADLINE_MS}"
        )


def check_token_ids(token_ids: TokenIds, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for a prompt that is empty, too long, or has ids beyond the vocabulary."""
    if not len(token_ids):
        raise InvalidRequestError("the prompt is empty; give at least one token")
    values = np.frombuffer(token_ids.data, np.int32)
    for token_id in (int(values.min()), int(values.max())):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError(
                f"prompt: token id {token_id} is not in the vocabulary of {limits.vocab_size}"
            )
    if len(token_ids) >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens, the model takes at most {limits.max_model_len - 1} "
            f"and one to generate ({limits.max_model_len} by {limits.max_model_len_reason}); shorten it"
        )


def kv_capacity(num_prompt: int, limits: RequestLimits) -> int:
    """Return how many tokens can be generated before the KV blocks are full; the last one needs no KV."""
    return limits.num_blocks * limits.block_size + 1 - num_prompt


def check_room(num_prompt: int, max_tokens: int, limits: RequestLimits) -> None:
    """Raise InvalidRequestError if prompt and output together exceed all KV blocks."""
    if max_tokens > kv_capacity(num_prompt, limits):
        needed = -(-(num_prompt + max_tokens - 1) // limits.block_size)
        raise InvalidRequestError(
            f"a prompt of {num_prompt} tokens and {max_tokens} to generate need {needed} KV blocks of "
            f"{limits.block_size} tokens, there are {limits.num_blocks}; lower max_tokens or raise "
            f"kv.num_blocks"
        )


def check_request(request: QueuedRequest, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for a request that `InputProcessor` would not have produced.

    Its parameters are checked by `check_shared`, once for all requests that have them. So no queued sequence
    fails in the middle of a step because of another process's input.
    """
    asked = request.request
    num_prompt = len(asked.token_ids)
    check_names(asked.request_id, asked.namespace, asked.tenant)
    check_weight(asked.tenant.weight)
    check_priority(asked.priority)
    check_token_ids(asked.token_ids, limits)
    check_room(num_prompt, asked.max_tokens, limits)
    if not 1 <= asked.max_tokens <= limits.max_model_len - num_prompt:
        raise InvalidRequestError(
            f"{asked.max_tokens} tokens are to be generated after a prompt of {num_prompt}; "
            f"there is room for 1 to {limits.max_model_len - num_prompt}"
        )
    if asked.arrival_ns < 0:
        raise InvalidRequestError(f"arrival_ns is {asked.arrival_ns}; it must not be negative")
    if asked.deadline_ns is not None:
        check_deadline_ms((asked.deadline_ns - asked.arrival_ns) / 1e6)


def check_shared(params: SamplingParams, given_stop_ids: frozenset[int], limits: RequestLimits) -> None:
    """Raise InvalidRequestError for what `InputProcessor` would not have given the requests of one job."""
    check_params(params, limits)
    if unknown := given_stop_ids - stop_token_ids(params, limits):
        raise InvalidRequestError(
            f"stop token ids {shown(unknown)} are neither the request's nor the model's"
        )


def check_params(params: SamplingParams, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for parameters that this model or its logits processors do not accept."""
    params.validate_for(limits.vocab_size)
    _check_extra_args(params.extra_args or {}, limits)
    if params.return_hidden_states and not limits.hidden_size:
        raise InvalidRequestError(f"return_hidden_states is True, and {limits.hidden_size_reason}")
    if params.allowed_token_ids is None:
        return
    banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        banned |= stop_token_ids(params, limits)
    if banned.issuperset(params.allowed_token_ids):
        raise InvalidRequestError(
            "allowed_token_ids: each of them is banned, as a bad word or, before min_tokens, as a token "
            "that ends the output"
        )


def stop_token_ids(params: SamplingParams, limits: RequestLimits) -> frozenset[int]:
    """Return the tokens that end an output: the request's own and, unless it ignores them, the model's."""
    eos: frozenset[int] = frozenset() if params.ignore_eos else limits.eos_token_ids
    return eos | frozenset(params.stop_token_ids or ())


def _check_extra_args(extra_args: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse arguments that no logits processor declares, and values that it does not allow."""
    for name, value in extra_args.items():
        declared = [arg for arg in limits.extra_args if arg.name == name]
        if not declared:
            known = sorted({arg.name for arg in limits.extra_args})
            there = ", ".join(known) or "none; --logits-processors switches on those that read some"
            raise InvalidRequestError(
                f"extra_args has {shown(name)}, which no logits processor of this engine reads; "
                f"there is {there}.{nearest(name[:64], known)}"
            )
        for arg in declared:
            if not arg.accepts(value):
                raise InvalidRequestError(
                    f"extra_args has {shown(value)} for {name}; it must be {arg.possible}"
                )


def _is_unicode(text: str) -> bool:
    """Say whether a text can be encoded as UTF-8, that is, has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
