"""A text that grows, and where each of its runs of tokens occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

BREAK = -1
"""Between two texts that were appended one after the other; no draft crosses it."""

_FACTOR, _MASK = 6_364_136_223_846_793_005, (1 << 64) - 1
_FEW = 16
"""Tokens that are cheaper to append one by one than as arrays."""


class Match(NamedTuple):
    """An earlier occurrence of the end of a text: it ends before token `end`, and `length` tokens agree."""

    end: int
    length: int


class Occurrences:
    """Tokens, with the previous occurrence of every run of `width` of them: O(1) for each token appended.

    About 100 bytes a token, most of them for the table of runs that differ.
    """

    __slots__ = ("_last", "_previous", "_width", "tokens")

    def __init__(self, width: int) -> None:
        self._width = width
        self.tokens = array("i")
        self._previous = array("i", [-1])  # of the run that ends before each place: where it ended before
        self._last: dict[int, int] = {}  # key of a run → where it ended last

    @property
    def repeats(self) -> bool:
        """Whether its last `width` tokens occurred before, or have the key of others that did."""
        return self._previous[-1] >= 0

    def append(self, ids: Ints) -> None:
        """Append tokens (tokens,)."""
        if len(ids) > _FEW:
            self._append_many(ids)
            return
        tokens, previous, last, width = self.tokens, self._previous, self._last, self._width
        end = len(tokens)
        for token in ids.tolist():
            tokens.append(token)
            end += 1
            if end < width:
                previous.append(-1)
                continue
            key = _key(tokens[end - width :])
            previous.append(last.get(key, -1))
            last[key] = end

    def matches(self, text: array[int], max_length: int) -> Iterator[Match]:
        """Yield where the end of a text occurred here, the latest first, with at least `width` tokens.

        Lengths are compared up to `max_length`. For the text itself, its own end does not count.
        """
        tokens, previous, size = self.tokens, self._previous, len(text)
        if size < self._width:
            return
        end = previous[size] if text is tokens else self._last.get(_key(text[size - self._width :]), -1)
        whole = text[-max_length:]
        is_comparable = len(whole) == max_length and BREAK not in whole
        while end >= 0:
            if is_comparable and end >= max_length and tokens[end - max_length : end] == whole:
                length = max_length
            else:
                length, most = 0, min(max_length, end, size)
                while length < most and tokens[end - 1 - length] == text[size - 1 - length] != BREAK:
                    length += 1
            if length >= self._width:  # else two runs have the same key, or it crosses a break
                yield Match(end, length)
            end = previous[end]

    def _append_many(self, ids: Ints) -> None:
        begin, width = len(self.tokens), self._width
        self.tokens.frombytes(np.ascontiguousarray(ids, np.int32).tobytes())
        size = len(self.tokens)
        first = max(begin + 1, width)  # of the ends of new runs
        self._previous.extend([-1] * (min(first, size + 1) - begin - 1))
        if first > size:
            return
        window = np.array(self.tokens[first - width :], np.int64).astype(np.uint64)
        num_runs = size - first + 1
        keys = np.zeros(num_runs, np.uint64)
        for offset in range(width):
            keys = keys * np.uint64(_FACTOR) + window[offset : offset + num_runs]
        order = np.argsort(keys, kind="stable")
        is_again = keys[order[1:]] == keys[order[:-1]]
        previous = np.full(num_runs, -1, np.int32)
        previous[order[1:][is_again]] = first + order[:-1][is_again]
        named = keys.tolist()
        if self._last:
            for place in np.flatnonzero(previous < 0).tolist():
                previous[place] = self._last.get(named[place], -1)
        self._previous.frombytes(previous.tobytes())
        self._last.update(zip(named, range(first, size + 1), strict=True))


def continuation(text: array[int], end: int, most: int) -> array[int]:
    """Return what followed there, up to a break; beyond the end of the text it repeats itself."""
    draft = text[end : end + most]
    if BREAK in draft:
        return draft[: draft.index(BREAK)]
    while draft and len(draft) < most:
        draft += draft[: most - len(draft)]
    return draft


def _key(run: array[int]) -> int:
    key = 0
    for token in run:
        key = (key * _FACTOR + token) & _MASK
    return key
