"""Forbids the token that would complete an unwanted word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sagellm.core import LogitsRequest, LogitsRow
from sagellm.engines.sampling.draws import Edits, Ints, edits_of, joined
from sagellm.engines.sampling.processors.counting import Longs, SparseProcessor, as_array

if TYPE_CHECKING:
    import torch


class Words(NamedTuple):
    """The words of one sequence. The longer ones are the request's own: they may have 100,000 tokens."""

    single: Longs  # words of one token
    longer: tuple[tuple[int, ...], ...]
    edits: Edits  # of the single ones


class BadWords(SparseProcessor[Words]):
    """`bad_words`: the last token of a word cannot be chosen after the others were generated.

    The prompt does not count as generated, as in vLLM.
    """

    def _start(self, request: LogitsRequest) -> Words | None:
        words = request.bad_words_token_ids
        if not words:
            return None
        single = as_array([word[0] for word in words if len(word) == 1])
        return Words(single, tuple(word for word in words if len(word) > 1), edits_of(single.tolist()))

    def needs_output(self, state: Words) -> bool:
        """Longer words do."""
        return bool(state.longer)

    def _edits(self, state: Words, output_token_ids: Ints) -> Edits:
        last = _last_of_begun(state, output_token_ids) if state.longer and len(output_token_ids) else ()
        return joined((state.edits, edits_of(last))) if last else state.edits

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[Words]]) -> None:
        from sagellm.engines.sampling.processors.cells import forbid

        places, token_ids = [], []
        for row, words, output_token_ids in rows:
            places.append(row)
            token_ids.append(words.single)
            if last := _last_of_begun(words, output_token_ids):
                places.append(row)
                token_ids.append(as_array(last))
        forbid(logits, places, token_ids)


def _last_of_begun(words: Words, output_token_ids: Sequence[int] | Ints) -> list[int]:
    return [word[-1] for word in words.longer if _has_begun(word, output_token_ids)]


def _has_begun(word: tuple[int, ...], output_token_ids: Sequence[int] | Ints) -> bool:
    """Say whether an output ends with all tokens of a word but its last."""
    num_before = len(word) - 1
    if num_before > len(output_token_ids) or output_token_ids[-1] != word[-2]:
        return False  # nearly always
    return tuple(output_token_ids[-num_before:]) == word[:-1]
