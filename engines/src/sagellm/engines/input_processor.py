"""Validates and tokenizes: what a caller hands in becomes sequences, or an error and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sagellm.core import (
    DEFAULT,
    InvalidInputError,
    InvalidRequestError,
    Namespace,
    Request,
    RequestId,
    RequestLimits as RequestLimits,
    Runtime,
    SequenceId,
    TokenIds,
    nearest,
    pack,
)
from sagellm.engines.core.sequence import Sequence
from sagellm.engines.sampling.checks import shown
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.text.bad_words import bad_words_token_ids
from sagellm.engines.text.tokenizer import decode, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Seq[int]

"""Text, or token ids."""


@dataclass(frozen=True, kw_only=True)
class ProcessedRequest:
    """A request that passed all checks, with one sequence for each continuation asked for."""

    request: Request
    prompt: str | None
    params: SamplingParams
    sequences: list[Sequence]

    @property
    def request_id(self) -> RequestId:
        """The id, given or made."""
        return self.request.request_id


class InputProcessor:
    """Makes sequences of prompts. Request ids are given or made; the caller looks after duplicates."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, limits: RequestLimits, runtime: Runtime
    ) -> None:
        self._tokenizer = tokenizer
        self.limits = limits
        self._clock = runtime.clock
        self._seeds = runtime.randomness.stream("sampling seeds")
        self._last_checked: tuple[SamplingParams, SamplingParams] | None = None

    def process_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT,
        priority: int = 0,
    ) -> ProcessedRequest:
        """Check one request and make its sequences. Raises InvalidRequestError."""
        _check_types(params, request_id, namespace, priority)
        token_ids = self._tokenize(prompt)
        max_tokens = self._max_tokens(len(token_ids), params)
        params = self._checked(params)
        request = Request(
            request_id=RequestId(request_id or uuid4().hex),
            token_ids=token_ids,
            max_tokens=max_tokens,
            priority=priority,
            arrival_ns=self._clock.now_ns(),
            namespace=namespace,
        )
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # One sequence scores the prompt for all.
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        sequences = [
            self._sequence(request, others if index else params, seed, index) for index in range(params.n)
        ]
        text = prompt if isinstance(prompt, str) else None
        return ProcessedRequest(request=request, prompt=text, params=params, sequences=sequences)

    def process_requests(
        self, prompts: Seq[Prompt], params: Seq[SamplingParams], *, namespace: Namespace = DEFAULT
    ) -> list[ProcessedRequest]:
        """Check requests, each with its parameters. Raises InvalidRequestError for the first wrong one."""
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
        limits = self.limits
        if isinstance(prompt, str):
            token_ids = pack(self._encode(prompt))
        else:
            try:
                token_ids = pack(prompt)
            except InvalidInputError as error:
                raise InvalidRequestError(f"prompt: {error}") from error
        if not len(token_ids):
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if (largest := max(token_ids.tolist())) >= limits.vocab_size:
            raise InvalidRequestError(
                f"prompt: token id {largest} is not in the vocabulary of {limits.vocab_size}"
            )
        if len(token_ids) >= limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, the model takes at most {limits.max_model_len - 1} "
                f"and one to generate ({limits.max_model_len} by {limits.max_model_len_reason}); shorten it"
            )
        return token_ids

    def _encode(self, text: str) -> Seq[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("the prompt is text and the model has no tokenizer; give token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a pair, such as bytes that were no UTF-8 leave
            raise InvalidRequestError(f"the prompt is not valid Unicode text: {error}") from error
        return encode(self._tokenizer, text)

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with bad words as tokens; many prompts share one object."""
        last = self._last_checked
        if last is not None and last[0] is params:
            return last[1]
        checked = self._with_bad_words(params)
        checked.validate_for(self.limits.vocab_size)
        self._check_extra_args(checked.extra_args or {})
        self._check_something_is_allowed(checked)
        self._last_checked = params, checked
        return checked

    def _check_extra_args(self, extra_args: Mapping[str, Any]) -> None:
        """Refuse arguments that no logits processor declares, and values that it does not allow."""
        for name, value in extra_args.items():
            declared = [arg for arg in self.limits.extra_args if arg.name == name]
            if not declared:
                known = sorted({arg.name for arg in self.limits.extra_args})
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

    def _check_something_is_allowed(self, params: SamplingParams) -> None:
        if params.allowed_token_ids is None:
            return
        banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
        if params.min_tokens:
            banned |= self._stop_token_ids(params)
        if banned.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids: each of them is banned, as a bad word or, before min_tokens, as a token "
                "that ends the output"
            )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos: frozenset[int] = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        return eos | frozenset(params.stop_token_ids or ())

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
        # The last generated token is never written to KV.
        capacity = limits.num_blocks * limits.block_size + 1 - num_prompt
        if params.max_tokens is None:
            max_tokens = min(max_tokens, max(1, capacity))
        if max_tokens > capacity:
            needed = -(-(num_prompt + max_tokens - 1) // limits.block_size)
            raise InvalidRequestError(
                f"a prompt of {num_prompt} tokens and {max_tokens} to generate need {needed} KV blocks of "
                f"{limits.block_size} tokens, there are {limits.num_blocks}; lower max_tokens or raise "
                f"kv.num_blocks"
            )
        return max_tokens

    def _sequence(self, request: Request, params: SamplingParams, seed: int, index: int) -> Sequence:
        sequence_id = f"{request.request_id}#{index}"  # always: else "a#0" may be a request or a part of one
        return Sequence.of(
            request,
            SequenceId(sequence_id),
            params=params,
            seed=(seed + index) % (1 << 63),
            stop_token_ids=self._stop_token_ids(params),
        )


def _check_types(params: object, request_id: object, namespace: object, priority: object) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params is {params!r}; it must be SamplingParams")
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise InvalidRequestError(f"request_id is {request_id!r}; it must be a text that is not empty")
    # A key of caches: what has no hash would fail in the middle of a step.
    if not isinstance(namespace, Namespace) or not all(isinstance(part, str) for part in namespace):
        raise InvalidRequestError(
            f"namespace is {namespace!r}; it must be a Namespace(tenant=…, salt=…) of texts"
        )
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority is {priority!r}; it must be an integer, larger is more urgent")
