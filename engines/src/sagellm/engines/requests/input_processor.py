"""Validates and tokenizes: a caller's input becomes a queued request, or an error without side effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, TypedDict, Unpack
from uuid import uuid4

from sagellm.core import (
    DEFAULT,
    DEFAULT_TENANT,
    InvalidInputError,
    InvalidRequestError,
    Namespace,
    Request,
    RequestId,
    Runtime,
    Tenant,
    TokenIds,
    pack,
)
from sagellm.core.protocols.engine import RequestLimits as RequestLimits
from sagellm.engines.requests.prompts import Prompt as Prompt, content_of
from sagellm.engines.requests.queued_request import MAX_SEED, QueuedRequest
from sagellm.engines.requests.request_checks import (
    check_deadline_ms,
    check_names,
    check_params,
    check_priority,
    check_room,
    check_token_ids,
    check_weight,
    kv_capacity,
    stop_token_ids,
)
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.text.bad_words import bad_words_token_ids
from sagellm.engines.text.guarded_tokenizer import decode, encode

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer


class RequestOptions(TypedDict, total=False):
    """What a request may say besides its prompt and its sampling."""

    request_id: str | None  # a new one by default
    namespace: Namespace
    tenant: Tenant  # who is charged
    priority: int  # larger runs first, among those of a tenant
    deadline_ms: float | None  # from now; after that the request ends with the reason "deadline"


class InputProcessor:
    """Makes requests from prompts. Request ids are given or generated; the caller checks for duplicates."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        runtime: Runtime,
        default_params: SamplingParams | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.limits = limits
        self.default_params = default_params or SamplingParams()
        self._clock = runtime.clock
        self._seeds = runtime.randomness.stream("sampling seeds")
        self._last_checked: tuple[SamplingParams, SamplingParams] | None = None

    def process_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> QueuedRequest:
        """Check and tokenize one request, by default with `default_params`. Raises InvalidRequestError."""
        request_id = options.pop("request_id", None)
        return next(self.process_job([prompt], params, [request_id], **options))

    def process_job(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | None = None,
        request_ids: Seq[str | None] = (),
        **options: Unpack[RequestOptions],
    ) -> Iterator[QueuedRequest]:
        """Check the parameters, once, then check, tokenize and yield the requests one by one.

        All of them have the same parameters and options; an id is generated for each that has none. Raises
        InvalidRequestError.
        """
        arrival_ns = self._clock.now_ns()
        params = self.default_params if params is None else params
        deadline_ms = options.pop("deadline_ms", None)
        given = RequestOptions(namespace=DEFAULT, tenant=DEFAULT_TENANT, priority=0) | options
        _check_types(params, given)
        check_deadline_ms(deadline_ms)
        deadline_ns = None if deadline_ms is None else arrival_ns + int(deadline_ms * 1e6)
        checked = self._checked(params)
        stop_ids = stop_token_ids(checked, self.limits)
        for prompt, request_id in zip(prompts, request_ids or repeat(None)):  # noqa: B905 - endless
            token_ids = self._tokenize(prompt)
            request = Request(
                request_id=_checked_id(request_id, given),
                token_ids=token_ids,
                max_tokens=self._max_tokens(len(token_ids), checked),
                arrival_ns=arrival_ns,
                deadline_ns=deadline_ns,
                namespace=given["namespace"],
                tenant=given["tenant"],
                priority=given["priority"],
            )
            seed = self._seeds.getrandbits(63) if checked.seed is None else checked.seed
            yield QueuedRequest(request, checked, seed % (MAX_SEED + 1), stop_ids)

    def process_requests(
        self, prompts: Seq[Prompt], params: Seq[SamplingParams], *, namespace: Namespace = DEFAULT
    ) -> list[QueuedRequest]:
        """Check requests, each with its parameters. Raises InvalidRequestError for the first invalid one."""
        return [
            self.process_request(prompt, one, namespace=namespace)
            for prompt, one in zip(prompts, params, strict=True)
        ]

    def decode_tokens(self, token_ids: Seq[int]) -> str:
        """Turn token ids back into text, without special tokens."""
        if self._tokenizer is None:
            return ""
        return decode(self._tokenizer, token_ids, skip_special_tokens=True)

    def _tokenize(self, prompt: Prompt) -> TokenIds:
        content = content_of(prompt)
        if isinstance(content, str):
            token_ids = pack(self._encode(content))
        else:
            try:
                token_ids = pack(content)
            except InvalidInputError as error:
                raise InvalidRequestError(f"prompt: {error}") from error
        check_token_ids(token_ids, self.limits)
        return token_ids

    def _encode(self, text: str) -> Seq[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("the prompt is text and the model has no tokenizer; give token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate
            raise InvalidRequestError(f"the prompt is not valid Unicode text: {error}") from error
        return encode(self._tokenizer, text)

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with bad words as tokens; requests one by one may share one object, too."""
        last = self._last_checked
        if last is not None and last[0] is params:
            return last[1]
        checked = self._with_bad_words(params)
        check_params(checked, self.limits)
        self._last_checked = params, checked
        return checked

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words:
            return params
        if self._tokenizer is None:
            raise InvalidRequestError(
                "bad_words are text and the model has no tokenizer; give bad_words_token_ids"
            )
        token_ids = bad_words_token_ids(params.bad_words, self._tokenizer)
        return replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *token_ids))

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        limits = self.limits
        room = limits.max_model_len - num_prompt
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.max_tokens is None:
            max_tokens = min(max_tokens, max(1, kv_capacity(num_prompt, limits)))
        check_room(num_prompt, max_tokens, limits)
        return max_tokens


def _checked_id(request_id: str | None, options: RequestOptions) -> RequestId:
    """Return a request's id, or a new one. Raises InvalidRequestError, also for its other names."""
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise InvalidRequestError(f"request_id is {request_id!r}; it must be a text that is not empty")
    known = request_id or uuid4().hex
    check_names(known, options["namespace"], options["tenant"])
    return RequestId(known)


def _check_types(params: object, options: RequestOptions) -> None:
    if unknown := sorted(options.keys() - RequestOptions.__annotations__.keys()):
        raise TypeError(
            f"a request has no {unknown[0]!r}; it has {', '.join(RequestOptions.__annotations__)}"
        )
    namespace, tenant = options["namespace"], options["tenant"]
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params is {params!r}; it must be SamplingParams")
    # A cache key: an unhashable one would fail in the middle of a step.
    if not isinstance(namespace, Namespace) or not all(isinstance(part, str) for part in namespace):
        raise InvalidRequestError(
            f"namespace is {namespace!r}; it must be a Namespace(tenant=…, salt=…) of texts"
        )
    if not isinstance(tenant, Tenant) or not isinstance(tenant.name, str):
        raise InvalidRequestError(f"tenant is {tenant!r}; it must be a Tenant(name=…, weight=…)")
    check_weight(tenant.weight)
    check_priority(options["priority"])
