"""Draws at sampled positions on the host: with a kernel, or with the sampler where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.engine import SampledToken
from sagellm.engines.sampling.draws import Details, Edits, HostDraw, Logits, joined
from sagellm.engines.sampling.logprobs import width, with_logprobs
from sagellm.engines.sampling.rows import BadLogitsError
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.worker.masks import Words
from sagellm.engines.worker.sampled import Places, Sampled
from sagellm.engines.worker.seat_draws import SeatDraws

if TYPE_CHECKING:
    import torch


class Drawn(NamedTuple):
    """Tokens of positions."""

    tokens: npt.NDArray[np.integer]  # (positions,); -1: the position has no distribution
    logprobs: dict[int, SampledToken]  # of the positions that ask for them, by place


def as_tensor(logits: Logits) -> torch.Tensor:
    """Return logits as torch takes them, without a copy."""
    if not isinstance(logits, np.ndarray):
        return logits
    import torch

    return torch.from_numpy(logits)


class RowDraw(Protocol):
    """Draws a token at each of some positions."""

    def __call__(
        self, logits: Logits, which: Places | None, sampled: Sampled, masks: dict[int, Words]
    ) -> Drawn:
        """Draw from logits (positions of the step, vocab), which stay as they are.

        `sampled` are the positions `which` of the step, or all; masks are by place among them.
        """
        ...


class SamplerDraw:
    """Draws with torch."""

    def __init__(self, sampler: Sampler, draws: SeatDraws) -> None:
        self._sampler, self._draws = sampler, draws

    def __call__(
        self, logits: Logits, which: Places | None, sampled: Sampled, masks: dict[int, Words]
    ) -> Drawn:
        """Draw row by row of the sampler's table."""
        rows, scores = self._draws.rows(sampled, masks), as_tensor(logits)
        if which is not None:
            scores = scores[which]
        tokens = np.full(len(rows), -1, np.int64)
        good = list(range(len(rows)))
        try:
            found = self._sampler.sample(scores, rows)
        except BadLogitsError as error:  # what follows a refused draft may be one
            good = [place for place in good if place not in error.rows]
            found = self._sampler.sample(scores[good], [rows[place] for place in good])
        tokens[good] = [each.token_id for each in found]
        return Drawn(
            tokens, {p: each for p, each in zip(good, found, strict=True) if each.logprob is not None}
        )


class KernelDraw:
    """Draws with one call of a kernel. What a position asks for beside a token costs that position alone."""

    def __init__(self, kernel: HostDraw, sampler: Sampler, draws: SeatDraws) -> None:
        self._kernel, self._sampler, self._draws = kernel, sampler, draws

    def __call__(
        self, logits: Logits, which: Places | None, sampled: Sampled, masks: dict[int, Words]
    ) -> Drawn:
        """Draw with the settings of the seats."""
        draws, seats = self._draws, sampled.seats
        is_plain = draws.learn(seats)
        settings = draws.settings(seats, sampled.places)
        if is_plain and not masks and which is None:
            return Drawn(self._kernel.choose(logits, *settings), {})
        details = self._details(logits, which, sampled, masks)
        num_top = draws.num_top.take(seats)
        asked = (num_top >= 0).nonzero()[0].tolist()
        if asked:
            most = min(int(num_top.max()), logits.shape[1])
            details.num_top = num_top
            details.logprobs = np.empty((len(seats), width(most)))
        tokens = self._kernel.choose(logits, *settings, details)
        return Drawn(
            tokens,
            {
                place: with_logprobs(int(tokens[place]), details.logprobs[place], int(num_top[place]))
                for place in asked
            },
        )

    def _details(
        self, logits: Logits, which: Places | None, sampled: Sampled, masks: dict[int, Words]
    ) -> Details:
        details = Details(places=None if which is None else which.astype(np.int32))
        has_plugins = self._draws.has_plugins.take(sampled.seats)
        if np.count_nonzero(has_plugins):
            self._replace(details, logits, has_plugins.nonzero()[0], sampled)
        self._edit(details, logits.shape[1], sampled, masks)
        if masks:
            details.masks = np.stack(list(masks.values()))
            details.mask_rows = np.full(len(sampled.seats), -1, np.int32)
            details.mask_rows[list(masks)] = np.arange(len(masks))
        return details

    def _replace(self, details: Details, logits: Logits, some: Places, sampled: Sampled) -> None:
        """Have processors that need torch change copies of their own rows."""
        rows = self._draws.rows(sampled.take(some), {})
        places = some if details.places is None else details.places[some]
        changed = self._sampler.changed(as_tensor(logits).float(), places.tolist(), rows)
        details.replaced = changed.numpy()
        details.replaced_rows = np.full(len(sampled.seats), -1, np.int32)
        details.replaced_rows[some] = np.arange(len(some))

    def _edit(self, details: Details, vocab_size: int, sampled: Sampled, masks: dict[int, Words]) -> None:
        """Collect the edits of positions, and add what their sequences allow to the masks."""
        draws = self._draws
        counts = np.zeros(len(sampled.seats) + 1, np.int64)
        parts: list[Edits] = []
        penalties: list[Edits] = []  # of the row, after each of its drafts
        for place in draws.with_changes(sampled.seats):
            seat = int(sampled.seats[place])
            output = draws.output(seat, int(sampled.places[place]))
            found: list[Edits] = []
            if draws.has_penalties[seat]:
                within = 0 if sampled.within is None else int(sampled.within[place])
                if within == 0:
                    drafts = sampled.drafts_from(place)
                    penalties = draws.penalties(seat, vocab_size).after_each(output, drafts)
                found = [penalties[within]]
            if (sparse := draws.sparse[seat]) is not None:
                found += sparse.edits(output)
                if sparse.mask is not None:
                    masks[place] = masks[place] & sparse.mask if place in masks else sparse.mask
            counts[place + 1] = sum(map(len, found))
            parts += found
        if parts:
            details.edits, details.edit_offsets = joined(parts), counts.cumsum()
