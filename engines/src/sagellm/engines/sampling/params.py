"""What a request may ask of sampling, checked once when it is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from sagellm.core.errors import InvalidRequestError, nearest
from sagellm.engines.sampling import checks
from sagellm.engines.sampling.checks import MAX_LOGPROBS as MAX_LOGPROBS, MAX_N as MAX_N

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy: dividing by less could overflow float32."""

_INSTEAD = {
    "best_of": "give n and logprobs=0, and keep the outputs with the highest cumulative_logprob per token, "
    "as POST /v1/completions does for best_of",
    "guided_decoding": "output cannot be held to a grammar; leave it out",
    "logits_processors": "name them in the engine's logits_processors; give their arguments as extra_args",
    "structured_outputs": "output cannot be held to a grammar; leave it out",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "there is no beam search; leave it out",
}
"""Parameters of vLLM without an equivalent here, and what to do instead."""

_Strings: TypeAlias = str | Collection[str] | None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and defaults are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 filter nothing. `seed` None takes one
    from the engine. `max_tokens` None goes to the model's limit. `logprobs` is how many of the most
    likely tokens to report with each sampled one; None reports nothing. Presence and frequency
    penalties see the output, the repetition penalty the prompt too. Stop tokens and the end of
    sequence cannot be chosen before `min_tokens`, nor can a stop string end the request.

    `prompt_logprobs` reports the tokens of the prompt as `logprobs` does those of the output.
    `logit_bias` is added to the logits of tokens, -100 to 100; nothing but `allowed_token_ids` is
    chosen, where given; `bad_words` are not generated, neither at the beginning of a text nor after
    a space. `bad_words_token_ids` are the same in token ids: the engine fills them in from
    `bad_words`, and without a tokenizer they can be given. `extra_args` are
    arguments of third-party logits processors; only those that an active one declares are accepted.

    Raises InvalidRequestError for whatever is out of range, of the wrong type or not finite.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: _Strings = ()  # kept as a tuple
    stop_token_ids: Collection[int] | None = ()  # kept as a tuple
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # kept as a dict
    allowed_token_ids: Collection[int] | None = None  # kept as a tuple
    bad_words: _Strings = ()  # kept as a tuple
    bad_words_token_ids: Collection[Sequence[int]] = ()  # kept as tuples
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)  # kept as a dict

    if not TYPE_CHECKING:  # a type checker knows the names from the fields

        def __new__(cls, *_: object, **given: object):  # noqa: D102
            for name in given.keys() - cls.__dataclass_fields__.keys():
                if name in _INSTEAD:
                    raise InvalidRequestError(f"SamplingParams has no {name!r}: {_INSTEAD[name]}")
                known = ", ".join(cls.__dataclass_fields__)
                hint = nearest(name, cls.__dataclass_fields__)
                raise InvalidRequestError(f"SamplingParams has no {name!r}; it has {known}.{hint}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in checks.INT_RANGES:
            self._set(name, checks.integer(name, getattr(self, name)))
        for name in checks.FLOAT_RANGES:
            self._set(name, checks.number(name, getattr(self, name)))
        for each in fields(self):
            if isinstance(each.default, bool) and not isinstance(getattr(self, each.name), bool):
                raise InvalidRequestError(
                    f"{each.name} is {getattr(self, each.name)!r}; it must be True or False"
                )
        self._set("top_k", max(self.top_k, 0))
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

    def validate_for(self, vocab_size: int) -> None:
        """Check what depends on the model. Raises InvalidRequestError for tokens that it does not know."""
        named: dict[str, Collection[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": [token for word in self.bad_words_token_ids for token in word],
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
