"""Valid values of a request's parameters; others raise an InvalidRequestError naming the parameter."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from sagellm.core.errors import InvalidRequestError
from sagellm.engines.config.shown import shown

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 1024
GREEDY_BELOW = 1e-5
"""A temperature below this means greedy: dividing by less could overflow float32."""

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of requests: how flags and HTTP bodies offer it, and its range if it is a number."""

    help: str  # of its flag
    type: Any  # of its flag; also of bodies for int, float and bool
    low: float = 0.0
    high: float = 0.0
    includes_low: bool = True
    is_optional: bool = False  # may be None
    is_of_checkpoint: bool = False  # generation_config.json may set it
    body_high: float | None = None  # the highest value in a body, if it differs


def integer(name: str, value: Any, allowed: Parameter) -> int | None:
    """Return an integer within a range, or None where that is allowed."""
    low, high = allowed.low, allowed.high
    if value is None and allowed.is_optional:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        either = "None or " if allowed.is_optional else ""
        raise InvalidRequestError(
            f"{name} is {shown(value)}; it must be {either}an integer from {low} to {high}"
        )
    return int(value)


def number(name: str, value: Any, allowed: Parameter) -> float:
    """Return a finite number within a range."""
    low, includes_low, high = allowed.low, allowed.includes_low, allowed.high
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and (low <= number if includes_low else low < number) and number <= high:
            return number
    lowest = f"of {low:g} or more" if includes_low else f"above {low:g}"
    raise InvalidRequestError(
        f"{name} is {shown(value)}; it must be a finite number {lowest} and at most {high:.15g}"
    )


def texts(name: str, values: Any, *, most: int, most_characters: int) -> tuple[str, ...]:
    """Return texts that are neither empty nor too long; a single text counts as a list of one."""
    items = _items(name, (values,) if isinstance(values, str) else values, most)
    for text in items:
        if not isinstance(text, str) or not 0 < len(text) <= most_characters:
            raise InvalidRequestError(
                f"{name} has {shown(text)}; each must be a text of 1 to {most_characters} characters"
            )
    return items


def ids(name: str, values: Any, most: int = MAX_COUNT) -> tuple[int, ...]:
    """Return token ids."""
    items = _items(name, values, most)
    if not items or (set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_COUNT):
        return items  # nearly always, and ten times as fast: there may be 100,000 of them
    return tuple(_token_id(name, token) for token in items)


def id_lists(name: str, values: Any, most: int) -> tuple[tuple[int, ...], ...]:
    """Return lists of token ids, none of them empty."""
    lists = tuple(ids(name, each) for each in _items(name, values, most))
    if not all(lists):
        raise InvalidRequestError(f"{name} has an empty list; each must hold at least one token id")
    return lists


def biases(name: str, values: Any) -> dict[int, float]:
    """Return a copy of a mapping from token ids to what is added to their logits."""
    given = {} if values is None else values
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{name} is {shown(values)}; it must be a mapping of token ids to numbers")
    if len(given) > MAX_BIASES:
        raise InvalidRequestError(f"{name} has {len(given)} entries; there may be at most {MAX_BIASES}")
    return {_token_id(name, token): _bias(name, token, value) for token, value in given.items()}


def arguments(name: str, values: Any) -> dict[str, Any]:
    """Return a copy of a mapping with texts for keys."""
    given = {} if values is None else values
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidRequestError(f"{name} is {shown(values)}; it must be a mapping whose keys are texts")
    return dict(given)


def _bias(name: str, token: Any, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not -MAX_BIAS <= value <= MAX_BIAS:  # also rejects NaN
        raise InvalidRequestError(
            f"{name} of token {token} is {shown(value)}; it must be a number from {-MAX_BIAS} to {MAX_BIAS}"
        )
    return float(value)


def _token_id(name: str, token: Any) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) <= MAX_COUNT:
        raise InvalidRequestError(f"{name} has {shown(token)}; each must be a token id, 0 or more")
    return int(token)


def _items(name: str, values: Any, most: int) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
        raise InvalidRequestError(f"{name} is {shown(values)}; it must be a list")
    if len(values) > most:
        raise InvalidRequestError(f"{name} has {len(values)} entries; there may be at most {most}")
    return tuple(values)
