"""What each thing that is known of a request says about the length of its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median

from sagellm.core import PredictionRequest
from sagellm.kvmgr.lifetime.lengths import NUM_BINS, TAIL, Floats, Histogram, position_of

_OWN_STRENGTH = 8.0
"""Observations of all requests that a group's own distribution begins with."""

_MAX_GROUPS = 1024


@dataclass(slots=True)
class Asked:
    """A request, and what sources noted when they were asked about it."""

    request: PredictionRequest
    overall: Floats  # density (bins,) of all outputs
    notes: dict[str, tuple[Hashable, int]] = field(default_factory=dict)  # by source


class Source(ABC):
    """Says how long an output may be, as a density over bins, and learns how long it was.

    A source's `name` and what it says of a request tell which requests are alike in what is known of them.
    """

    name: str

    @abstractmethod
    def density(self, asked: Asked) -> tuple[str, Floats] | None:
        """Return a name for how much is known, and a density (bins,); None if nothing is known."""

    @abstractmethod
    def learn(self, asked: Asked, place: int | Floats) -> None:
        """Learn the bin of the length; its density if the output was cut."""


class Everything(Source):
    """All outputs together."""

    name = "all"

    def __init__(self, decay: float) -> None:
        self._histogram = Histogram(decay)

    @property
    def overall(self) -> Floats:
        """The density (bins,) of all outputs."""
        return self._histogram.density(TAIL, 0.5)

    def density(self, asked: Asked) -> tuple[str, Floats] | None:
        """Return what holds of all outputs."""
        return self.name, asked.overall

    def learn(self, asked: Asked, place: int | Floats) -> None:
        """Count the length."""
        self._histogram.add(place)


class Group(Source):
    """The outputs of requests that share something, as their prompts' length; the latest 1,024 groups."""

    def __init__(
        self, name: str, key_of: Callable[[PredictionRequest], Hashable | None], decay: float
    ) -> None:
        self.name = name
        self._key_of, self._decay = key_of, decay
        self._histograms: OrderedDict[Hashable, Histogram] = OrderedDict()

    def density(self, asked: Asked) -> tuple[str, Floats] | None:
        """Return what holds of the group, once one of it has ended."""
        key = self._key_of(asked.request)
        if key is None or (found := self._histograms.get(key)) is None:
            return None
        return self.name, found.density(asked.overall, _OWN_STRENGTH)

    def learn(self, asked: Asked, place: int | Floats) -> None:
        """Count the length in its group."""
        key = self._key_of(asked.request)
        if key is None:
            return
        if (found := self._histograms.get(key)) is None:
            found = self._histograms[key] = Histogram(self._decay)
            if len(self._histograms) > _MAX_GROUPS:
                self._histograms.popitem(last=False)
        self._histograms.move_to_end(key)
        found.add(place)


class Guess(Source):
    """A length, and how far off such lengths have been, in bins: that is, as a ratio.

    `guess_of` returns the length and what lengths have been as reliable as this one.
    """

    def __init__(
        self, name: str, guess_of: Callable[[PredictionRequest], tuple[float, Hashable] | None], decay: float
    ) -> None:
        self.name = name
        self._guess_of = guess_of
        self._errors: defaultdict[Hashable, Histogram] = defaultdict(lambda: Histogram(decay, 2 * NUM_BINS))

    def density(self, asked: Asked) -> tuple[str, Floats] | None:
        """Return the density of lengths that follow such a guess."""
        if (guess := self._guess_of(asked.request)) is None:
            return None
        length, group = guess
        place = int(position_of(length))
        asked.notes[self.name] = group, place
        errors = self._errors[group]
        shifted = errors.counts(NUM_BINS - place, 2 * NUM_BINS - place)
        found: Floats = shifted + (2 + 0.02 * errors.total) * asked.overall
        return f"{self.name} {group}", found / found.sum()

    def learn(self, asked: Asked, place: int | Floats) -> None:
        """Count how far off the guess was; not by an output that was cut."""
        if self.name in asked.notes and isinstance(place, int):
            group, guessed = asked.notes[self.name]
            self._errors[group].add(NUM_BINS + place - guessed)


def statistical_sources() -> list[Source]:
    """Return everything but all outputs together."""
    return [
        Group("prompt", _octave_part, 0.998),
        Group("near prompt", lambda request: bucket_of(len(request.token_ids), 32), 0.995),
        Group("client", _client, 0.998),
        Group("client and prompt", lambda request: (*_client(request), _octave_part(request)), 0.998),
        *prefix_guesses(),
    ]


def _octave_part(request: PredictionRequest) -> int:
    return bucket_of(len(request.token_ids), 4)


def _client(request: PredictionRequest) -> tuple[str, int]:
    return request.tenant, request.max_length


def prefix_guesses() -> list[Source]:
    """Return what answers to the longest known prefix say, and those to the next shorter one."""
    return [
        Guess(f"{name} {level}", lambda request, level=level, of=of: of(request, level), 0.999)  # type: ignore[misc]
        for level in (0, 1)
        for name, of in (("last", _last), ("median", _median))
    ]


def _last(request: PredictionRequest, level: int) -> tuple[float, Hashable] | None:
    if level >= len(request.answers):
        return None
    found = request.answers[level]
    return found.lengths[-1], min(found.num_answers, 3)


def _median(request: PredictionRequest, level: int) -> tuple[float, Hashable] | None:
    if level >= len(request.answers) or len(request.answers[level].lengths) < 3:
        return None
    found = request.answers[level]
    return median(found.lengths), min(found.num_answers, 8)


def bucket_of(num_tokens: int, parts: int) -> int:
    """Number such parts of octaves, a power of two: of 4, 0 … 7 have one each, then 8–9, 10–11, … 16–19, …"""
    shift = max(0, num_tokens.bit_length() - parts.bit_length())
    return parts * shift + (num_tokens >> shift)
