"""What a request may ask of sampling, checked once when it is made."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeAlias

from sagellm.core.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
GREEDY_BELOW = 1e-5
"""A temperature below this means greedy: dividing by less could overflow float32."""

_MAX_COUNT = 2**31 - 1
_INT_RANGES = {
    "n": (1, MAX_N),
    "top_k": (-1, _MAX_COUNT),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, _MAX_COUNT),
    "min_tokens": (0, _MAX_COUNT),
    "logprobs": (0, MAX_LOGPROBS),
}
_OPTIONAL = {"seed", "max_tokens", "logprobs"}
# (lowest, is it allowed, highest); the highest is always allowed. What has no natural end stays in float32.
_FLOAT_RANGES = {
    "temperature": (0.0, True, 1e6),
    "top_p": (0.0, False, 1.0),
    "min_p": (0.0, True, 1.0),
    "presence_penalty": (-2.0, True, 2.0),
    "frequency_penalty": (-2.0, True, 2.0),
    "repetition_penalty": (1e-9, True, 1e6),
}
_Strings: TypeAlias = str | Collection[str] | None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and defaults are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 filter nothing. `seed` None takes one
    from the engine. `max_tokens` None goes to the model's limit. `logprobs` is how many of the most
    likely tokens to report with each sampled one; None reports nothing. Presence and frequency
    penalties see the output, the repetition penalty the prompt too. Stop tokens and the end of
    sequence cannot be chosen before `min_tokens`, nor can a stop string end the request.

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

    def __post_init__(self) -> None:
        for name in _INT_RANGES:
            self._set(name, _integer(name, getattr(self, name)))
        for name in _FLOAT_RANGES:
            self._set(name, _number(name, getattr(self, name)))
        for field in fields(self):
            if isinstance(field.default, bool) and not isinstance(getattr(self, field.name), bool):
                raise InvalidRequestError(
                    f"{field.name} is {getattr(self, field.name)!r}; it must be True or False"
                )
        self._set("top_k", max(self.top_k, 0))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
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
        """Check what depends on the model. Raises InvalidRequestError for unknown stop tokens."""
        unknown = [token for token in self.stop_token_ids or () if token >= vocab_size]
        if unknown:
            raise InvalidRequestError(
                f"stop_token_ids has {unknown[0]}, which the model does not know; "
                f"its tokens are 0 to {vocab_size - 1}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _integer(name: str, value: Any) -> int | None:
    low, high = _INT_RANGES[name]
    if value is None and name in _OPTIONAL:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        either = "None or " if name in _OPTIONAL else ""
        raise InvalidRequestError(
            f"{name} is {_shown(value)}; it must be {either}an integer from {low} to {high}"
        )
    return int(value)


def _number(name: str, value: Any) -> float:
    low, includes_low, high = _FLOAT_RANGES[name]
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and (low <= number if includes_low else low < number) and number <= high:
            return number
    lowest = f"of {low:g} or more" if includes_low else f"above {low:g}"
    raise InvalidRequestError(
        f"{name} is {_shown(value)}; it must be a finite number {lowest} and at most {high:.15g}"
    )


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = _items("stop", (stop,) if isinstance(stop, str) else stop, MAX_STOPS)
    for text in stops:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop has {_shown(text)}; each must be a text of 1 to {MAX_STOP_CHARACTERS} characters"
            )
    return stops


def _stop_token_ids(token_ids: Any) -> tuple[int, ...]:
    ids = _items("stop_token_ids", token_ids, MAX_STOP_TOKEN_IDS)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) <= _MAX_COUNT:
            raise InvalidRequestError(
                f"stop_token_ids has {_shown(token)}; each must be a token id, 0 or more"
            )
    return tuple(int(token) for token in ids)


def _items(name: str, values: Any, most: int) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
        raise InvalidRequestError(f"{name} is {_shown(values)}; it must be a list")
    if len(values) > most:
        raise InvalidRequestError(f"{name} has {len(values)} entries; there may be at most {most}")
    return tuple(values)


def _shown(value: object) -> str:
    # Longer integers cannot even be printed (sys.set_int_max_str_digits).
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:60]}…"
