"""The sampled positions of a step: where tokens are drawn, and which of them are kept."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import StepInput

Ints = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]

NO_DRAFT = -2
"""In place of a draft where none follows: neither a token, nor the -1 of a row that has no distribution."""

_NEVER = np.int32(2**31 - 1)


class Sampled(NamedTuple):
    """Sampled positions of a step, row by row: a sampled row has one more than it has drafts.

    Their logits come in this order.
    """

    rows: Places  # (positions,) of the step
    seats: Ints  # (positions,)
    places: Ints  # (positions,) of the tokens that they draw, in their sequences
    drafts: Ints | None = None  # (positions,) the draft that follows each, or NO_DRAFT; None: no row has any
    within: Ints | None = None  # (positions,) drafts of its row before each
    counts: Ints | None = None  # (sampled rows,) positions of each; None: some positions were taken

    def take(self, which: Places) -> Sampled:
        """Return some of the positions."""
        if self.drafts is None or self.within is None:
            return Sampled(self.rows[which], self.seats[which], self.places[which])
        return Sampled(
            self.rows[which], self.seats[which], self.places[which], self.drafts[which], self.within[which]
        )

    def drafts_from(self, place: int) -> list[int]:
        """Return the drafts of a row that follow one of its positions."""
        if self.drafts is None:
            return []
        after = self.drafts[place:]
        drafts: list[int] = after[: int((after == NO_DRAFT).argmax())].tolist()
        return drafts

    def kept(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_] | None:
        """Say which tokens count: those up to the first of their row that is not the draft in its place.

        None: all of them.
        """
        if self.drafts is None or self.within is None or not len(tokens):
            return None
        assert self.counts is not None, "these are all positions of a step"
        refused = np.where(tokens != self.drafts, self.within, _NEVER)
        first: Ints = np.minimum.reduceat(refused, self.counts.cumsum() - self.counts)
        is_kept: npt.NDArray[np.bool_] = self.within <= first.repeat(self.counts)
        return is_kept

    def write(self, table: Ints, tokens: Ints, is_kept: npt.NDArray[np.bool_] | None) -> None:
        """Write the tokens that count into a table (seats, places)."""
        if is_kept is None:
            table[self.seats, self.places] = tokens
        else:
            table[self.seats[is_kept], self.places[is_kept]] = tokens[is_kept]


def sampled_positions(step: StepInput) -> Sampled:
    """Return all sampled positions of a step."""
    rows = step.is_sampled.nonzero()[0]
    seats, ends = step.seats[rows], (step.starts + step.num_new)[rows]
    if step.drafts is None:
        return Sampled(rows, seats, ends)
    num_drafts = step.drafts.counts[rows]
    counts = num_drafts + 1
    stops = counts.cumsum()
    index = np.arange(len(rows)).repeat(counts)
    within = np.arange(len(index), dtype=np.int32) - (stops - counts).astype(np.int32)[index]
    drafts = np.full(len(index), NO_DRAFT, np.int32)
    drafts[within < num_drafts[index]] = step.drafts.ids
    places = (ends - num_drafts)[index] + within
    return Sampled(rows[index], seats[index], places, drafts, within, counts)
