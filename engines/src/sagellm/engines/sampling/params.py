"""The sampling parameters of a request, checked once when created."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

from sagellm.core.errors import InvalidRequestError, nearest
from sagellm.engines.sampling import checks
from sagellm.engines.sampling.checks import MAX_LOGPROBS as MAX_LOGPROBS, MAX_N as MAX_N, Parameter
from sagellm.engines.sampling.structured_outputs import StructuredOutputs
from sagellm.engines.sampling.vllm_parameters import without_vllm_parameters

if TYPE_CHECKING:
    _StructuredOutputs = StructuredOutputs | Mapping[str, Any]
else:
    _StructuredOutputs = StructuredOutputs  # what crosses a link is checked against one type

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy: dividing by less could overflow float32."""

_PARAMETER = "parameter"


def _integer(default: int | None, text: str, low: int, high: int, **also: Any) -> Any:
    return _declared(default, Parameter(help=text, type=int, low=low, high=high, **also))


def _number(default: float, text: str, low: float, high: float, **also: Any) -> Any:
    return _declared(default, Parameter(help=text, type=float, low=low, high=high, **also))


def _flag(default: Any, text: str, kind: Any, **also: Any) -> Any:
    return _declared(default, Parameter(help=text, type=kind, **also))


def _declared(default: Any, parameter: Parameter) -> Any:
    return field(default=default, metadata={_PARAMETER: parameter}, hash=parameter.type is not dict)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and defaults are vLLM's.

    Flags, HTTP bodies and range checks are all derived from each field's `Parameter`.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 filter nothing. With `seed` None, the engine
    chooses one. `max_tokens` None means up to the model's limit. `logprobs` is how many of the most likely
    tokens to report with each sampled one; None reports nothing. Presence and frequency penalties see the
    output, the repetition penalty the prompt too. Stop tokens and the end of sequence cannot be chosen before
    `min_tokens`, nor can a stop string end the request.

    `prompt_logprobs` does for the tokens of the prompt what `logprobs` does for those of the output.
    `return_hidden_states`, SGLang's, reports what the model's head was given for each token of the output.
    `logit_bias` is added to the logits of tokens, -100 to 100; if `allowed_token_ids` is given, no other
    token is chosen; `bad_words` are not generated, neither at the beginning of a text nor after a space.
    `bad_words_token_ids` are the same as token ids: the engine fills them in from `bad_words`, and they can
    be given directly without a tokenizer. `extra_args` are arguments of third-party logits processors; only
    those that an active one declares are accepted.
    `structured_outputs` says what the text must match; a mapping of its fields is one too.

    Raises InvalidRequestError for values out of range, of the wrong type or not finite.
    """

    max_tokens: int | None = _integer(16, "most tokens to generate", 1, checks.MAX_COUNT, is_optional=True)
    min_tokens: int = _integer(0, "fewest tokens to generate", 0, checks.MAX_COUNT, is_of_checkpoint=True)
    temperature: float = _number(
        1.0,
        "randomness; 0 always takes the most likely token",
        0.0,
        1e6,  # no natural limit, but must fit float32
        body_high=100,
        is_of_checkpoint=True,
    )
    top_p: float = _number(
        1.0,
        "keep the most likely tokens that together have this probability",
        0.0,
        1.0,
        includes_low=False,
        is_of_checkpoint=True,
    )
    top_k: int = _integer(
        0,
        "keep this many of the most likely tokens; 0 keeps all",
        -1,
        checks.MAX_COUNT,
        is_of_checkpoint=True,
    )
    min_p: float = _number(
        0.0,
        "keep tokens at least this likely in comparison with the most likely one",
        0.0,
        1.0,
        is_of_checkpoint=True,
    )
    seed: int | None = _integer(
        None, "seed; the same seed gives the same text", -(2**63), 2**63 - 1, is_optional=True
    )
    n: int = _integer(1, "continuations of each prompt", 1, MAX_N)
    stop: str | Collection[str] | None = _flag(
        (), "text that ends the output", list[str], is_of_checkpoint=True
    )  # kept as a tuple
    stop_token_ids: Collection[int] | None = _flag((), "token that ends the output", list[int])  # likewise
    bad_words: str | Collection[str] | None = _flag(
        (), "word that must not be generated", list[str]
    )  # likewise
    bad_words_token_ids: Collection[Sequence[int]] = ()  # kept as tuples
    allowed_token_ids: Collection[int] | None = _flag(
        None, "token that may be generated, no other may", list[int]
    )  # kept as a tuple
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # kept as a dict
    presence_penalty: float = _number(0.0, "make tokens that occur in the output less likely", -2.0, 2.0)
    frequency_penalty: float = _number(
        0.0, "make tokens less likely the more often they occur in the output", -2.0, 2.0
    )
    repetition_penalty: float = _number(
        1.0,
        "divide the chance of tokens that occur in prompt or output",
        1e-9,
        1e6,
        body_high=1000,
        is_of_checkpoint=True,
    )
    extra_args: Mapping[str, Any] | None = _flag(
        None, "arguments of logits processors, as in '{no_repeat_ngram_size: 3}'", dict
    )  # kept as a dict
    structured_outputs: _StructuredOutputs | None = None  # kept as StructuredOutputs
    logprobs: int | None = _integer(
        None,
        "report log-probabilities of this many tokens (--json shows them)",
        0,
        MAX_LOGPROBS,
        is_optional=True,
    )
    prompt_logprobs: int | None = _integer(
        None, "the same of the tokens of the prompt (--json shows them)", 0, MAX_LOGPROBS, is_optional=True
    )
    return_hidden_states: bool = _flag(
        False, "report the last hidden state at each token (--json shows them)", bool
    )
    ignore_eos: bool = _flag(False, "go on after the end of the text", bool)
    skip_special_tokens: bool = _flag(True, "leave special tokens out of the text", bool)
    include_stop_str_in_output: bool = _flag(False, "keep the stop text in the output", bool)
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, check, allowed in _RANGES:
            self._set(name, check(name, getattr(self, name), allowed))
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._set("top_k", max(self.top_k, 0))
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._check_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; it must not be above max_tokens ({self.max_tokens})"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need text; set detokenize=True or leave stop empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred before change the logits."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def overridden(self, **given: Any) -> SamplingParams:
        """Return these defaults with what a request gives; their `min_tokens` yields to its `max_tokens`.

        Raises InvalidRequestError.
        """
        most = given.get("max_tokens")
        if isinstance(most, int) and "min_tokens" not in given:
            given["min_tokens"] = min(self.min_tokens, most)
        return replace(self, **given)

    @property
    def without_prompt_logprobs(self) -> SamplingParams:
        """The same without `prompt_logprobs`, made once."""
        return self if self.prompt_logprobs is None else self._unscored

    @cached_property
    def _unscored(self) -> SamplingParams:
        return replace(self, prompt_logprobs=None)

    def validate_for(self, vocab_size: int) -> None:
        """Check what depends on the model. Raises InvalidRequestError for tokens unknown to it."""
        named: dict[str, Collection[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": [max(word) for word in self.bad_words_token_ids],
        }
        for name, token_ids in named.items():
            unknown = max(token_ids, default=0)
            if unknown >= vocab_size:
                raise InvalidRequestError(
                    f"{name} has {unknown}, which the model does not know; "
                    f"its tokens are 0 to {vocab_size - 1}"
                )

    def _check_lists(self) -> None:
        stops = checks.texts(
            "stop", self.stop, most=checks.MAX_STOPS, most_characters=checks.MAX_STOP_CHARACTERS
        )
        self._set("stop", stops)
        stop_ids = checks.ids("stop_token_ids", self.stop_token_ids, checks.MAX_STOP_TOKEN_IDS)
        self._set("stop_token_ids", stop_ids)
        self._set("logit_bias", checks.biases("logit_bias", self.logit_bias) or None)
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", checks.ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids is empty; name at least one token, or give None")
        bad_words = checks.texts(
            "bad_words",
            self.bad_words,
            most=checks.MAX_BAD_WORDS,
            most_characters=checks.MAX_BAD_WORD_CHARACTERS,
        )
        self._set("bad_words", bad_words)
        # Each word has two forms.
        lists = checks.id_lists("bad_words_token_ids", self.bad_words_token_ids, 2 * checks.MAX_BAD_WORDS)
        self._set("bad_words_token_ids", lists)
        self._set("extra_args", checks.arguments("extra_args", self.extra_args) or None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _taking_vllm_parameters(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `__init__` to accept vLLM's further parameters, and to tell misspelt ones the nearest."""

    @wraps(init)
    def take(self: SamplingParams, **given: Any) -> None:
        if given.keys() - self.__dataclass_fields__.keys():
            given = without_vllm_parameters(given)
        for name in given.keys() - self.__dataclass_fields__.keys():
            known = ", ".join(self.__dataclass_fields__)
            hint = nearest(name, self.__dataclass_fields__)
            raise InvalidRequestError(f"SamplingParams has no {name!r}; it has {known}.{hint}")
        init(self, **given)

    return take


SamplingParams.__init__ = _taking_vllm_parameters(SamplingParams.__init__)  # type: ignore[method-assign]

PARAMETERS: dict[str, Parameter] = {
    each.name: each.metadata[_PARAMETER] for each in fields(SamplingParams) if _PARAMETER in each.metadata
}
"""What flags and HTTP bodies offer, by name, in the order of `--help`."""

_RANGES = [
    (name, checks.integer if each.type is int else checks.number, each)
    for name, each in PARAMETERS.items()
    if each.type in (int, float)
]
_BOOLEANS = [each.name for each in fields(SamplingParams) if isinstance(each.default, bool)]
