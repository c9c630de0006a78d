"""How long the texts of a pattern are, and patterns whose texts are as long as a schema says."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from sagellm.core.errors import InvalidRequestError

_TIMES = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}


class _Part(NamedTuple):
    """A character, a set or a group, how many characters it has, and how often it comes."""

    atom: str
    width: tuple[int, float]
    times: tuple[int, float] | None = None  # None: once, as nothing is said

    @property
    def low(self) -> int:
        """Its fewest characters."""
        return self.width[0] * (1 if self.times is None else self.times[0])

    @property
    def high(self) -> float:
        """Its most characters."""
        most = 1 if self.times is None else self.times[1]
        return self.width[1] * most if self.width[1] and most else 0

    def __str__(self) -> str:
        if self.times is None:
            return self.atom
        low, high = self.times
        return f"{self.atom}{{{low},{'' if high == math.inf else int(high)}}}"


def with_lengths(tokens: list[str], fewest: int, most: float) -> str | None:
    """Return a pattern, given by its tokens, whose texts have so many characters; None if it has none.

    The pattern matches whole texts. Raises InvalidRequestError unless its lengths are within the limits, or
    one repeat of a character can be limited.
    """
    alternatives = _parts(deque(tokens))
    low, high = _width(alternatives)
    if low >= fewest and high <= most:
        return "".join(tokens)
    if low > most or high < fewest:
        return None
    varying = [part for part in alternatives[0] if part.low != part.high]
    if len(alternatives) > 1 or len(varying) > 1 or varying[0].width != (1, 1):
        texts = f"{low} or more" if high == math.inf else f"{low} to {high:g}"
        raise InvalidRequestError(
            f"its texts have {texts} characters; limits need one repeat of one character that tells how many"
        )
    fixed = low - varying[0].low
    times = max(varying[0].low, fewest - fixed), min(varying[0].high, most - fixed)
    parts = (each._replace(times=times) if each is varying[0] else each for each in alternatives[0])
    return "".join(map(str, parts))


def _parts(tokens: deque[str]) -> list[list[_Part]]:
    """Take alternatives up to the end of a group or of the pattern, each as its parts."""
    found: list[list[_Part]] = [[]]
    while tokens and tokens[0] != ")":
        token = tokens.popleft()
        last = found[-1]
        if token == "|":
            found.append([])
        elif token.startswith("("):
            inner = _parts(tokens)
            tokens.popleft()
            text = "|".join("".join(map(str, each)) for each in inner)
            last.append(_Part(f"{token}{text})", _width(inner)))
        elif (times := _times(token)) is None:
            last.append(_Part(token, (1, 1)))
        elif last[-1].times is None:  # else it says how eagerly, which texts do not tell
            last[-1] = last[-1]._replace(times=times)
    return found


def _width(alternatives: list[list[_Part]]) -> tuple[int, float]:
    return (
        min(sum(part.low for part in each) for each in alternatives),
        max(sum(part.high for part in each) for each in alternatives),
    )


def _times(token: str) -> tuple[int, float] | None:
    if not (token.startswith("{") and len(token) > 1):
        return _TIMES.get(token)
    low, comma, high = token[1:-1].partition(",")
    return int(low), int(high) if high else math.inf if comma else int(low)
