"""The penalties of a sequence as edits of single logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sagellm.core.tokens import TokenIds
from sagellm.engines.sampling.draws import EDIT, Edits, Ints
from sagellm.engines.sampling.params import SamplingParams

TokenArray = npt.NDArray[np.int64]
_NO_IDS: TokenArray = np.empty(0, np.int64)


def ids_in(token_ids: Sequence[int], vocab_size: int) -> TokenArray:
    """Return the ids of a sequence that are in the vocabulary."""
    if isinstance(token_ids, TokenIds):
        ids: TokenArray = np.frombuffer(token_ids.data, dtype=np.int32).astype(np.int64)
    else:
        ids = np.array(token_ids, dtype=np.int64)  # a copy: a view would prevent an array('i') from growing
    return ids[ids < vocab_size]


class SequencePenalties:
    """The penalties at the end of one sequence, as edits of its logits, kept as its tokens come.

    They do what `apply_penalties` does to the last bit, at the cost of the tokens since the last call.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: TokenIds, vocab_size: int) -> None:
        self._repetition = params.repetition_penalty
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._vocab_size = vocab_size
        prompt = np.unique(ids_in(prompt_token_ids, vocab_size)) if self._repetition != 1.0 else _NO_IDS
        self._prompt = prompt
        self.num_counted = 0  # output tokens
        self._begin()

    def _begin(self) -> None:
        self.num_counted, self._num_edits = 0, len(self._prompt)
        self._edits = np.empty(len(self._prompt) + 64, EDIT)
        self._edits["factor"] = self._repetition
        self._addends = self._edits["addend"]
        self._addends[:] = 0.0
        self._edits["token"][: len(self._prompt)] = self._prompt
        self._counts = [0] * len(self._prompt)
        self._place_of = dict(zip(self._prompt.tolist(), range(len(self._prompt)), strict=True))

    def after_each(self, output_token_ids: Ints, drafts: Sequence[int]) -> list[Edits]:
        """Return the edits after an output, and after each of its drafts, which are not kept.

        The edits hold until the next call.
        """
        self._take_in(output_token_ids)
        if not drafts:
            return [self._edits[: self._num_edits]]
        found = [self._edits[: self._num_edits].copy()]
        before: list[tuple[int, int]] = []  # tokens and their counts; -1: new
        for token in drafts:
            place = self._place_of.get(token)
            before.append((token, -1 if place is None else self._counts[place]))
            self._count(token)
            found.append(self._edits[: self._num_edits].copy())
        for token, count in reversed(before):
            if count >= 0:
                self._set(self._place_of[token], count)
            elif self._place_of.pop(token, None) is not None:
                self._counts.pop()
                self._num_edits -= 1
        return found

    def _take_in(self, output_token_ids: Ints) -> None:
        if len(output_token_ids) < self.num_counted:  # a step is computed again
            self._begin()
        for token in output_token_ids[self.num_counted :].tolist():
            self._count(token)
        self.num_counted = len(output_token_ids)

    def _count(self, token: int) -> None:
        if token >= self._vocab_size:
            return
        place = self._place_of.get(token)
        if place is None:
            place = self._place_of[token] = self._num_edits
            if place == len(self._edits):
                self._edits = np.concatenate((self._edits, self._edits))
                self._addends = self._edits["addend"]
            self._edits[place] = (token, self._repetition, 0.0)
            self._counts.append(0)
            self._num_edits += 1
        self._set(place, self._counts[place] + 1)

    def _set(self, place: int, count: int) -> None:
        self._counts[place] = count
        loss = self._frequency * count + self._presence if count else 0.0
        self._addends[place] = -loss
