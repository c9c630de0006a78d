"""Drafts from the text itself: what followed its last tokens the last time."""

from __future__ import annotations

from array import array
from itertools import islice

import numpy as np
import numpy.typing as npt

from sagellm.core import ConfigError, DraftProposerMetrics, DraftProposerProtocol, Namespace
from sagellm.core.protocols.step import Runs, Seat
from sagellm.engines.drafts.occurrences import Match, Occurrences, continuation

Ints = npt.NDArray[np.int32]

_NUM_TRIED = 8
"""Earlier occurrences that are compared; the latest are first."""


class NgramProposer(DraftProposerProtocol):
    """Proposes what followed the longest end of the text that occurred in it before (prompt lookup).

    The latest of equally long ones counts. A token that is told costs O(1), a draft up to eight comparisons.
    Source: Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self, *, max_tokens: int = 8, min_match: int = 2, max_match: int = 16) -> None:
        """Propose at most `max_tokens`, after at least `min_match` and at most `max_match` equal tokens.

        Raises ConfigError for other numbers than positive ones, or if `max_match` is below `min_match`.
        """
        require_counts(max_tokens=max_tokens, min_match=min_match, max_match=max_match)
        self._max_tokens, self._min_match, self._max_match = max_tokens, min_match, max_match
        self._texts: dict[int, Occurrences] = {}
        self._num_sequences = self._num_asked = self._num_drafts = self._num_proposed = 0

    def arrived(self, seat: Seat, token_ids: Ints, num_prompt: int, namespace: Namespace) -> None:
        """Index a sequence."""
        self._num_sequences += 1
        text = self._texts[seat] = Occurrences(self._min_match)
        text.append(token_ids)

    def extended(self, seats: Ints, tokens: Runs) -> None:
        """Append to sequences."""
        append_runs(self._texts, seats, tokens)

    def departed(self, seat: Seat, *, is_over: bool) -> None:
        """Forget a sequence."""
        self._texts.pop(seat, None)

    def propose(self, seats: Ints, most: Ints) -> Runs:
        """Return a draft for each sequence."""
        ids, counts = array("i"), []
        for seat, number in zip(seats.tolist(), most.tolist(), strict=True):
            before, text = len(ids), self._texts[seat]
            if number > 0 and text.repeats:
                ids += self._draft(text, min(number, self._max_tokens))
            counts.append(len(ids) - before)
        self._num_asked += len(counts)
        self._num_drafts += len(counts) - counts.count(0)
        self._num_proposed += len(ids)
        return Runs(np.array(ids, np.int32), np.array(counts, np.int32))

    def metrics(self) -> DraftProposerMetrics:
        """Return the counts so far."""
        return DraftProposerMetrics(
            num_sequences=self._num_sequences,
            num_asked=self._num_asked,
            num_drafts=self._num_drafts,
            num_proposed=self._num_proposed,
            num_kept_tokens=sum(len(text.tokens) for text in self._texts.values()),
        )

    def _draft(self, text: Occurrences, most: int) -> array[int]:
        best = Match(0, 0)
        for match in islice(text.matches(text.tokens, self._max_match), _NUM_TRIED):
            if match.length > best.length:
                best = match
                if match.length == self._max_match:
                    break
        return continuation(text.tokens, best.end, most) if best.length else array("i")


def append_runs(texts: dict[int, Occurrences], seats: Ints, tokens: Runs) -> None:
    """Append each run to its seat's text."""
    end = 0
    for seat, count in zip(seats.tolist(), tokens.counts.tolist(), strict=True):
        begin, end = end, end + count
        texts[seat].append(tokens.ids[begin:end])


def require_counts(**counts: int) -> None:
    """Raise ConfigError unless all are positive ints, and `max_match` at least `min_match`."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if counts["max_match"] < counts["min_match"]:
        raise ConfigError(
            f"max_match is {counts['max_match']} and min_match {counts['min_match']}; "
            "max_match must be at least min_match"
        )
