"""When a sequence ends: token limits, end of sequence, stop tokens, and stop strings in its text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

from sagellm.core.errors import InvalidInputError
from sagellm.core.request import FinishReason
from sagellm.engines.sampling.params import SamplingParams


class StopDecision(NamedTuple):
    """Why a sequence ends, None while it goes on, and the stop token if one ended it."""

    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


_GOES_ON = StopDecision()


def check_stop_conditions(
    params: SamplingParams,
    output_token_ids: Sequence[int],
    eos_token_ids: Collection[int],
    max_tokens: int,
) -> StopDecision:
    """Say whether the last output token ends the sequence.

    `max_tokens` is what the request may generate at most, its own limit and the model's. A stop token is
    reported, the model's end of sequence is not, as in vLLM. StopStringMatcher handles stop strings.
    """
    if not output_token_ids:
        return _GOES_ON
    if len(output_token_ids) > params.min_tokens:
        last = output_token_ids[-1]
        if last in (params.stop_token_ids or ()):
            return StopDecision("stop", last)
        if last in eos_token_ids and not params.ignore_eos:
            return StopDecision("stop")
    return StopDecision("length") if len(output_token_ids) >= max_tokens else _GOES_ON


class Emitted(NamedTuple):
    """Text that may be shown, and the stop string that ended it."""

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Finds stop strings in text that arrives in pieces, and passes on what cannot belong to one.

    The string whose last character comes first wins, however the text is cut into tokens; among several that
    end there, the longest. The text ends before it, or after it with `include_stop`. Only text that could
    still become a stop string is held back. Costs O(1) per character and stop string (Knuth, Morris and Pratt
    1977), whatever the strings.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if isinstance(stops, str) or not all(stops):
            raise InvalidInputError(
                f"stop strings are {stops!r}; they must be a list of texts that are not empty"
            )
        self._stops, self._borders = _prepared(tuple(stops))
        self._matched = [0] * len(self._stops)  # length of each one's prefix that the text so far ends with
        self._include_stop = include_stop
        self._held = ""
        self._stop: str | None = None

    def append(self, text: str, *, may_stop: bool = True) -> Emitted:
        """Take more text and return what may be shown now.

        With `may_stop` False, as before `min_tokens`, a stop string that this text completes is treated as
        ordinary text. After a stop everything is dropped.
        """
        if self._stop is not None:
            return Emitted("", self._stop)
        buffer = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None and may_stop:
                self._stop, self._held = stop, ""
                return Emitted(buffer[: index if self._include_stop else index - len(stop)], stop)
        num_held = max(self._matched, default=0)
        split = len(buffer) - num_held
        self._held = buffer[split:]
        return Emitted(buffer[:split])

    def finish(self) -> str:
        """Return what was held back; no more text will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Advance every string by one character; return the longest one that is complete."""
        complete = None
        for which, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[which]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                complete = complete or stop
                matched = borders[-1]
            self._matched[which] = matched
        return complete


@lru_cache(maxsize=4)  # one job may have a thousand continuations with the same strings
def _prepared(stops: tuple[str, ...]) -> tuple[list[str], list[list[int]]]:
    """Return the strings, the longest first, so that of two that end together it is found; their borders."""
    ordered = sorted(stops, key=len, reverse=True)
    return ordered, [_borders(stop) for stop in ordered]


def _borders(text: str) -> list[int]:
    """Return, for each prefix of the text, the length of its longest proper prefix that is also a suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
