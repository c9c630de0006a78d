"""Learns in which order outputs end, from pairs of them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque

import numpy as np

from sagellm.core import PredictionRequest, get_logger
from sagellm.kvmgr.lifetime.features import MAX_LEVELS, NUM_NUMBERS, NUM_OF_LEVEL, NUM_WORDS, features_of
from sagellm.kvmgr.lifetime.lengths import Floats
from sagellm.kvmgr.lifetime.mixture import MixturePredictor
from sagellm.kvmgr.lifetime.sources import Everything, Guess, statistical_sources

_logger = get_logger(__name__)

_NUM_KNOWN = NUM_NUMBERS + MAX_LEVELS * (NUM_OF_LEVEL + 1)
_NUM_PAIRS, _NUM_RANKED = 32, 512
_RATE = 0.05


class _Example:
    """A request's features, in the form of a linear model: numbers, and the words that it has."""

    __slots__ = ("known", "length", "words")

    def __init__(self, request: PredictionRequest) -> None:
        features = features_of(request)
        levels = np.zeros((MAX_LEVELS, NUM_OF_LEVEL + 1))
        levels[: len(features.levels), 0] = 1.0
        levels[: len(features.levels), 1:] = features.levels
        self.known: Floats = np.concatenate((features.numbers.astype(np.float64), levels.ravel())) / 4.0
        self.words = np.unique(features.text)
        self.length = 0


class Ranker:
    """Scores requests so that of two the one with the higher score has the longer output.

    A linear model of features and words, trained on each output that ends against the latest 32 before it, by
    the logistic loss of their order (RankNet: Burges et al., 2005) with AdaGrad.
    """

    def __init__(self) -> None:
        self._weights, self._squares = np.zeros(_NUM_KNOWN + NUM_WORDS), np.full(_NUM_KNOWN + NUM_WORDS, 1e-2)
        self._latest: deque[_Example] = deque(maxlen=_NUM_PAIRS)
        self._ranked: deque[tuple[float, int]] = deque()
        self._scores: list[float] = []
        self._lengths: list[int] = []

    def score(self, example: _Example) -> float:
        """Return a score without a unit."""
        words = self._weights[_NUM_KNOWN + example.words].sum() / math.sqrt(len(example.words) or 1)
        return float(self._weights[:_NUM_KNOWN] @ example.known + words)

    def length_of(self, score: float) -> float | None:
        """Return the length of the same rank among the latest 512 as the score; None while there are few."""
        if len(self._scores) < _NUM_PAIRS:
            return None
        return self._lengths[min(bisect_left(self._scores, score), len(self._lengths) - 1)]

    def learn(self, example: _Example, score: float, length: int) -> None:
        """Learn from an output that ended, and from the score that its request had."""
        example.length = length
        gradient: Floats = np.zeros_like(self._weights)
        own = self.score(example)
        for other in self._latest:
            if other.length == length:
                continue
            sign = 1.0 if length > other.length else -1.0
            pull = sign / (1 + math.exp(min(sign * (own - self.score(other)), 30.0))) / _NUM_PAIRS
            for one, share in ((example, pull), (other, -pull)):
                gradient[:_NUM_KNOWN] += share * one.known
                gradient[_NUM_KNOWN + one.words] += share / math.sqrt(len(one.words) or 1)
        self._squares += gradient * gradient
        self._weights += _RATE * gradient / np.sqrt(self._squares)
        self._latest.append(example)
        self._ranked.append((score, length))
        insort(self._scores, score)
        insort(self._lengths, length)
        if len(self._ranked) > _NUM_RANKED:
            score, length = self._ranked.popleft()
            del self._scores[bisect_left(self._scores, score)]
            del self._lengths[bisect_left(self._lengths, length)]


class RankingLifetimePredictor(MixturePredictor):
    """Learns the order of outputs while it serves, from features and words, and mixes it with statistics.

    The length that it mixes in is that of the same rank among the latest outputs. It needs no training
    beforehand.
    """

    def __init__(self, *, max_sequences: int = 16_384) -> None:
        self._ranker = Ranker()
        self._examples: OrderedDict[str, tuple[_Example, float]] = OrderedDict()
        own = Guess("rank", self._guess, 0.998)
        super().__init__(Everything(0.9995), [*statistical_sources(), own], max_sequences=max_sequences)
        _logger.info("the order of outputs is learnt from those that end")

    def update(self, *, sequence_id: str, actual_length: int, actual_time: float) -> None:
        """Learn from a sequence that ended; the order only from one that was not cut."""
        live = self._live.get(sequence_id)
        super().update(sequence_id=sequence_id, actual_length=actual_length, actual_time=actual_time)
        found = self._examples.pop(sequence_id, None)
        if live is not None and found is not None and actual_length < live.asked.request.max_length:
            self._ranker.learn(*found, actual_length)

    def forget(self, *, sequence_id: str) -> None:
        """Drop what was asked about it."""
        super().forget(sequence_id=sequence_id)
        self._examples.pop(sequence_id, None)

    def _guess(self, request: PredictionRequest) -> tuple[float, str] | None:
        example = _Example(request)
        score = self._ranker.score(example)
        self._examples[request.sequence_id] = example, score
        self._examples.move_to_end(request.sequence_id)
        if len(self._examples) > self._max_sequences:
            self._examples.popitem(last=False)
        length = self._ranker.length_of(score)
        return None if length is None else (length, "")
