"""Forbids the token that would complete an unwanted word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.processors.counting import CountingProcessor, forbid


class Word(NamedTuple):
    """The token that completes a word, and those that must precede it."""

    beginning: tuple[int, ...]
    last: int


class Words(NamedTuple):
    """The words of one sequence."""

    single: tuple[int, ...]  # words of one token
    longer: tuple[Word, ...]
    most_before: int  # tokens of the longest word before its last


class BadWords(CountingProcessor[Words]):
    """`bad_words`: the last token of a word cannot be chosen after the others were generated.

    The prompt does not count as generated, as in vLLM.
    """

    def _start(self, request: LogitsRequest) -> Words | None:
        words = [Word(word[:-1], word[-1]) for word in request.bad_words_token_ids]
        if not words:
            return None
        longer = tuple(word for word in words if word.beginning)
        return Words(
            single=tuple(word.last for word in words if not word.beginning),
            longer=longer,
            most_before=max((len(word.beginning) for word in longer), default=0),
        )

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Words]]) -> None:
        cells = [(row, token) for row, words, _ in rows for token in words.single]
        for row, words, output_token_ids in rows:
            if not words.longer:
                continue
            tail = tuple(output_token_ids[-words.most_before :])
            cells += [
                (row, word.last) for word in words.longer if tail[-len(word.beginning) :] == word.beginning
            ]
        forbid(logits, cells)
