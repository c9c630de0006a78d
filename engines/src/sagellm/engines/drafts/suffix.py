"""Drafts from the text itself and from earlier answers: what followed its last tokens most often."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from sagellm.core import ConfigError, DraftProposerMetrics, DraftProposerProtocol, Namespace
from sagellm.core.protocols.step import Runs, Seat
from sagellm.engines.drafts.ngram import append_runs, require_counts
from sagellm.engines.drafts.occurrences import BREAK, Occurrences, continuation

Ints = npt.NDArray[np.int32]

_NUM_TRIED = 16
"""Earlier occurrences that vote, of each text; the latest are first."""

_NUM_CHUNKS = 4
"""Parts of what may be kept; the oldest is forgotten as a whole."""


@dataclass(frozen=True, kw_only=True)
class SuffixMetrics(DraftProposerMetrics):
    """Also what is kept of earlier answers."""

    num_namespaces: int = 0  # of which answers are kept


class SuffixProposer(DraftProposerProtocol):
    """Proposes what most often followed the longest end of the text that occurred before.

    It looks in the sequence itself and in earlier answers in its namespace, never in those of another one. A
    draft goes on while its share among these occurrences is at least `min_probability`, and is at most
    `factor` times as long as the match. Earlier answers take `max_kept_tokens` in all, about 100 bytes each;
    beyond that, those of the namespace that was used least recently are forgotten first.
    Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975; occurrences are sampled here instead of counted
    in a tree, so that a token costs O(1) time and memory.
    """

    def __init__(
        self,
        *,
        max_tokens: int = 16,
        min_match: int = 2,
        max_match: int = 32,
        factor: float = 2.0,
        min_probability: float = 0.2,
        max_kept_tokens: int = 262_144,
    ) -> None:
        """Raise ConfigError for numbers out of range."""
        require_counts(max_tokens=max_tokens, min_match=min_match, max_match=max_match)
        if not 0 < factor < float("inf"):
            raise ConfigError(f"factor is {factor!r}; it must be a number above 0")
        if not 0 <= min_probability <= 1:
            raise ConfigError(f"min_probability is {min_probability!r}; it must be a number from 0 to 1")
        if type(max_kept_tokens) is not int or max_kept_tokens < 0:
            raise ConfigError(f"max_kept_tokens is {max_kept_tokens!r}; it must be a whole number, 0 or more")
        self._max_tokens, self._min_match, self._max_match = max_tokens, min_match, max_match
        self._factor, self._min_probability = factor, min_probability
        self._max_kept, self._num_kept = max_kept_tokens, 0
        self._texts: dict[int, Occurrences] = {}
        self._owners: dict[int, tuple[Namespace, int]] = {}  # seat → namespace, prompt's length
        self._answers: OrderedDict[Namespace, deque[Occurrences]] = OrderedDict()  # the newest chunk first
        self._num_sequences = self._num_asked = self._num_drafts = self._num_proposed = 0

    def arrived(self, seat: Seat, token_ids: Ints, num_prompt: int, namespace: Namespace) -> None:
        """Index a sequence."""
        self._num_sequences += 1
        text = self._texts[seat] = Occurrences(self._min_match)
        text.append(token_ids)
        self._owners[seat] = namespace, num_prompt
        if namespace in self._answers:
            self._answers.move_to_end(namespace)

    def extended(self, seats: Ints, tokens: Runs) -> None:
        """Append to sequences."""
        append_runs(self._texts, seats, tokens)

    def departed(self, seat: Seat, *, is_over: bool) -> None:
        """Forget a sequence; keep its answer if it is complete."""
        text = self._texts.pop(seat, None)
        if text is None:
            return
        namespace, num_prompt = self._owners.pop(seat)
        if is_over and len(text.tokens) - num_prompt >= self._min_match:
            self._keep(namespace, np.array(text.tokens[num_prompt:], np.int32))

    def propose(self, seats: Ints, most: Ints) -> Runs:
        """Return a draft for each sequence."""
        ids, counts = array("i"), []
        for seat, number in zip(seats.tolist(), most.tolist(), strict=True):
            before = len(ids)
            if number > 0:
                ids += self._draft(seat, min(number, self._max_tokens))
            counts.append(len(ids) - before)
        self._num_asked += len(counts)
        self._num_drafts += len(counts) - counts.count(0)
        self._num_proposed += len(ids)
        return Runs(np.array(ids, np.int32), np.array(counts, np.int32))

    def metrics(self) -> SuffixMetrics:
        """Return the counts so far."""
        return SuffixMetrics(
            num_sequences=self._num_sequences,
            num_asked=self._num_asked,
            num_drafts=self._num_drafts,
            num_proposed=self._num_proposed,
            num_kept_tokens=self._num_kept + sum(len(text.tokens) for text in self._texts.values()),
            num_namespaces=len(self._answers),
        )

    def _texts_for(self, seat: int) -> Iterator[Occurrences]:
        yield self._texts[seat]
        yield from self._answers.get(self._owners[seat][0], ())

    def _draft(self, seat: int, most: int) -> array[int]:
        own = self._texts[seat].tokens
        longest = 0
        places: list[tuple[array[int], int]] = []
        for text in self._texts_for(seat):
            for end, length in islice(text.matches(own, self._max_match), _NUM_TRIED):
                if length > longest:
                    longest, places = length, []
                if length == longest:
                    places.append((text.tokens, end))
        most = min(most, int(self._factor * longest))
        return self._commonest([continuation(text, end, most) for text, end in places])

    def _commonest(self, runs: list[array[int]]) -> array[int]:
        """Return what most of these begin with, token by token; the first of equals."""
        draft, probability = array("i"), 1.0
        while runs and runs.count(runs[0]) < len(runs):
            place = len(draft)
            following: dict[int, list[array[int]]] = {}
            for run in runs:
                if place < len(run):
                    following.setdefault(run[place], []).append(run)
            if not following:
                return draft
            token, chosen = max(following.items(), key=lambda each: len(each[1]))
            probability *= len(chosen) / len(runs)
            if probability < self._min_probability:
                return draft
            draft.append(token)
            runs = chosen
        return runs[0] if runs else draft

    def _keep(self, namespace: Namespace, answer: Ints) -> None:
        most = self._max_kept // _NUM_CHUNKS
        answer = answer[: max(0, most - 1)]
        if not len(answer):
            return
        chunks = self._answers.setdefault(namespace, deque())
        self._answers.move_to_end(namespace)
        if not chunks or len(chunks[0].tokens) + len(answer) >= most:
            chunks.appendleft(Occurrences(self._min_match))
        chunks[0].append(answer)
        chunks[0].append(np.array([BREAK], np.int32))
        self._num_kept += len(answer) + 1
        while self._num_kept > self._max_kept:
            oldest, held = next(iter(self._answers.items()))
            self._num_kept -= len(held.pop().tokens)
            if not held:
                del self._answers[oldest]
