"""From a body to SamplingParams, and the budgets that bound the total work of one body."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from sagellm.core import InvalidRequestError
from sagellm.engines.sampling.params import SamplingParams
from sagellm.server.http.body_schema import ChatBody, CompletionBody, SamplingBody
from sagellm.server.http.errors import as_api_error, invalid
from sagellm.server.http.reply import encode_json
from sagellm.server.http.structured import structured_outputs_of

MAX_SEQUENCES = 1024
MAX_OUTPUT_TOKENS = 1 << 21
MAX_LOGPROB_ENTRIES = 1 << 21
MAX_HIDDEN_STATES = 1024
"""Of some thousand numbers each, and 20 characters a number."""
MAX_PARAMETER_TOKENS = 1 << 21
MAX_EXTRA_BYTES = 64 << 10

_COMPLETION_TOKENS = 16  # as OpenAI documents
_CONVERTED = {"max_tokens", "logit_bias", "extra_args", "structured_outputs"}
_AS_THEY_ARE = [
    each.name
    for each in fields(SamplingParams)
    if each.name in SamplingBody.__struct_fields__ and each.name not in _CONVERTED
]


def completion_params(body: CompletionBody, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling that a completion asks for. Raises APIError."""
    given = _given(body)
    max_tokens = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens: expected `int` >= 1; 0 is for echo alone")
    given["max_tokens"] = max(max_tokens, 1)  # with 0, the token is computed and not shown
    given["logprobs"] = body.logprobs
    if body.best_of is not None:
        given |= _ranked(body, body.best_of, given.get("n", defaults.n))
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise invalid("logprobs", "logprobs: not given for a streamed echo; leave out stream or echo")
        given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return _made(defaults, given)


def _ranked(body: CompletionBody, best_of: int, num_choices: int) -> dict[str, Any]:
    """Return parameters that generate `best_of` continuations, and the log-probabilities to rank them."""
    if best_of < num_choices:
        raise invalid(
            "best_of",
            f"best_of: {best_of} continuations cannot give n={num_choices} of them; raise best_of or lower n",
        )
    if best_of > num_choices and body.stream:
        raise invalid("best_of", "best_of: only complete texts can be ranked; leave out stream")
    is_ranked = best_of > num_choices and body.logprobs is None
    return {"n": best_of, **({"logprobs": 0} if is_ranked else {})}


def chat_params(body: ChatBody, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling that a chat asks for. Raises APIError."""
    given = _given(body)
    given["max_tokens"] = body.max_completion_tokens or body.max_tokens
    if body.max_tokens == 0:
        raise invalid("max_tokens", "max_tokens: expected `int` >= 1")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs: needs logprobs to be true")
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return _made(defaults, given)


def has_two_limits(body: ChatBody) -> bool:
    """Say whether `max_tokens` has no effect, since `max_completion_tokens`, its newer name, differs."""
    return body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens)


class _Budget(NamedTuple):
    """A product of valid parts, and the most that it may be."""

    param: str
    amount: int
    most: int
    told: str  # how the amount comes about
    advice: str


def check_budget(
    params: SamplingParams,
    num_prompts: int,
    prompt_tokens: int,
    max_model_len: int,
    *,
    scored_by: str = "prompt_logprobs",
    times_scored: int = 1,
) -> None:
    """Raise APIError if the product of valid parts is out of range; `params.n` is best_of, if given.

    `scored_by` is the parameter that asks for log-probabilities of the prompt, which are written
    `times_scored` times.
    """
    num = num_prompts * params.n
    num_tokens = num * min(params.max_tokens or max_model_len, max_model_len)
    budgets = (
        *_budgets(params, num_prompts, num, num_tokens),
        *_logprob_budgets(params, times_scored * prompt_tokens, num_tokens, scored_by),
    )
    for param, amount, most, told, advice in budgets:
        if amount > most:
            raise invalid(param, f"{param}: {told}; there may be at most {most}: {advice}")


def _budgets(params: SamplingParams, num_prompts: int, num: int, num_tokens: int) -> Iterator[_Budget]:
    """Yield what is bounded of `num` continuations with `num_tokens` in all."""
    told = f"{num_prompts} prompts × {params.n} (n or best_of) are {num} continuations"
    yield _Budget("n", num, MAX_SEQUENCES, told, "lower n or best_of, or send fewer prompts")
    told = f"{num} continuations × {num_tokens // max(1, num)} are {num_tokens} tokens"
    yield _Budget("max_tokens", num_tokens, MAX_OUTPUT_TOKENS, told, "lower max_tokens or n")
    if params.return_hidden_states:
        told = f"{num_tokens} tokens have a hidden state each"
        advice = "lower max_tokens or n, or send fewer prompts"
        yield _Budget("return_hidden_states", num_tokens, MAX_HIDDEN_STATES, told, advice)
    sizes = {name: size for name, size in _parameter_sizes(params).items() if size}
    if sizes:
        size, largest = sum(sizes.values()), max(sizes, key=lambda name: sizes[name])
        told = f"{num} continuations × {size} tokens in {', '.join(sizes)} are {num * size}"
        advice = f"shorten {largest}, lower n, or send fewer prompts"
        yield _Budget(largest, num * size, MAX_PARAMETER_TOKENS, told, advice)


def _logprob_budgets(
    params: SamplingParams, prompt_tokens: int, num_tokens: int, scored_by: str
) -> Iterator[_Budget]:
    """Yield what is bounded of log-probabilities: those of the output, and those of prompt and output."""
    entries = 0
    if params.logprobs is not None:
        entries = num_tokens * (params.logprobs + 1)
        told = (
            f"{params.logprobs} and the token itself for {num_tokens} tokens are {entries} log-probabilities"
        )
        yield _Budget("logprobs", entries, MAX_LOGPROB_ENTRIES, told, "lower max_tokens or logprobs")
    if params.prompt_logprobs is not None and prompt_tokens:
        scores = prompt_tokens * (params.prompt_logprobs + 1)
        others = f", and up to {entries} of the output" if entries else ""
        told = (
            f"{params.prompt_logprobs} and the token itself for {prompt_tokens} prompt tokens are "
            f"{scores} log-probabilities{others}"
        )
        advice = f"lower {scored_by} or n, or send fewer or shorter prompts"
        yield _Budget(scored_by, entries + scores, MAX_LOGPROB_ENTRIES, told, advice)


def _parameter_sizes(params: SamplingParams) -> dict[str, int]:
    """Return how many tokens each parameter has that the engine looks at for each continuation."""
    return {
        "bad_words": sum(map(len, params.bad_words_token_ids)),
        "logit_bias": len(params.logit_bias or ()),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "stop_token_ids": len(params.stop_token_ids or ()),
    }


def _given(body: SamplingBody) -> dict[str, Any]:
    given = {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
    if body.stream_options is not None and not body.stream:
        raise invalid(
            "stream_options", "stream_options: only a stream has options; set stream to true, or leave it out"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise invalid(
            "prompt_logprobs",
            f"prompt_logprobs: {body.prompt_logprobs} with stream=true, but only a complete answer has "
            f"log-probabilities of the prompt; leave out stream or prompt_logprobs",
        )
    if given.get("return_hidden_states") and body.stream:
        raise invalid(
            "return_hidden_states",
            "return_hidden_states: only a complete answer has hidden states; leave out stream or "
            "return_hidden_states",
        )
    if body.extra_args and body.vllm_xargs:
        raise invalid("vllm_xargs", "vllm_xargs: this is another name of extra_args; give one of them")
    if extra_args := body.extra_args or body.vllm_xargs:
        given["extra_args"] = _checked_arguments(extra_args)
    if (structured := structured_outputs_of(body)) is not None:
        given["structured_outputs"] = structured
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return given


def _checked_arguments(extra_args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not null. Raises APIError if they are large: they go to the engine."""
    given = {name: value for name, value in extra_args.items() if value is not None}
    num_bytes = len(encode_json(given))
    if num_bytes > MAX_EXTRA_BYTES:
        raise invalid("extra_args", f"extra_args: {num_bytes} bytes; there may be at most {MAX_EXTRA_BYTES}")
    return given


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise invalid("logit_bias", f"logit_bias: the key {key!r} is not a token id")
    return int(key)


def _made(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    try:
        return defaults.overridden(**given)
    except InvalidRequestError as error:
        raise as_api_error(error) from None
