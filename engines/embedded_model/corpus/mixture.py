"""Draws samples from all generators in fixed shares, and keeps the examination's questions out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from corpus import arithmetic, chats, json_answers, lists, stories, text_tasks, tool_calls
from corpus.disguise import disguise
from corpus.questions import Questions, read_facts
from corpus.sample import Passage, Sample

EXAMINATION = Path(__file__).parents[1] / "examination.json"
RUN = 6  # no training text shares so many words in a row with a question of the examination

Generator = Callable[[random.Random], Sample]


def generators() -> list[tuple[Generator, float, float]]:
    """Return every generator with its share, and how strongly what users say may be disguised."""
    return [
        (Questions(read_facts()).make, 0.57, 1.0),
        (stories.make, 0.08, 1.0),
        (lists.make, 0.07, 1.0),
        (arithmetic.make, 0.09, 0.7),
        (chats.make, 0.07, 0.7),
        (text_tasks.make, 0.05, 0.3),
        (json_answers.make, 0.035, 0.5),
        (tool_calls.make, 0.035, 0.5),
    ]


class Mixture:
    """An endless stream of samples, the same for the same seed; a share of them is disguised."""

    def __init__(self, seed: int, *, disguised: float = 0.0, excluded: Iterable[str] | None = None) -> None:
        self._rng = random.Random(seed)
        self._disguised = disguised
        self._generators, self._shares, self._strengths = zip(*generators(), strict=True)
        questions = examination_questions() if excluded is None else excluded
        self._excluded = {run for question in questions for run in word_runs(question)}
        self.num_rejected = 0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        """Draw until a sample shares no run of words with the examination."""
        while True:
            which = self._rng.choices(range(len(self._generators)), self._shares)[0]
            sample = self._generators[which](self._rng)
            if self._disguised and self._rng.random() < self._disguised:
                sample = disguise(sample, self._rng, strength=self._strengths[which])
            if self._excluded.isdisjoint(run for text in texts_of(sample) for run in word_runs(text)):
                return sample
            self.num_rejected += 1


def examination_questions() -> list[str]:
    """Return the questions that training must not see."""
    return [entry["question"] for entry in json.loads(EXAMINATION.read_text(encoding="utf-8"))]


def texts_of(sample: Sample) -> list[str]:
    """Return the texts of a sample, one for each turn."""
    if isinstance(sample, Passage):
        return [sample.text]
    return [message.content for message in sample.messages]


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Return every run of six words, in lower case and without marks."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
