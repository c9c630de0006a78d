"""What changes logits before tokens are drawn on a device, collected without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.uploads import send, upload
from sagellm.core.tokens import TokenIds
from sagellm.engines.sampling.draws import IN_PROMPT, DeviceChanges, DeviceDraw, Edits, joined
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.worker.masks import Words

Longs = npt.NDArray[np.int64]
_NONE = -1.0


def upload_all(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays of any types and shapes to a device in one copy."""
    pieces = upload([each.reshape(-1).view(np.uint8) for each in arrays], device)
    return [
        piece.view(torch.from_numpy(each).dtype).view(each.shape)
        for piece, each in zip(pieces, arrays, strict=True)
    ]


class PenalisedRow(NamedTuple):
    """A row of logits whose sequence has penalties."""

    row: int
    seat: int
    generation: int
    params: SamplingParams
    prompt_token_ids: TokenIds
    output_token_ids: npt.NDArray[np.int32]  # what the host has
    has_late_token: bool  # one more, which only the device has
    drafts: Sequence[int]  # before this position


class DeviceCounts:
    """How often tokens occur in the sequences that have penalties, on the device.

    A seat gets a row of the counts when it is first penalised.
    """

    def __init__(self, draw: DeviceDraw, device: torch.device, vocab_size: int) -> None:
        self._draw, self._device, self._vocab_size = draw, device, vocab_size
        self._row_of: dict[int, int] = {}  # by seat
        self._generation: list[int] = []  # of each row, and
        self._num_counted: list[int] = []  # tokens of its output
        self.counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)  # and IN_PROMPT

    def count(self, rows: Sequence[PenalisedRow], last: torch.Tensor) -> list[int]:
        """Count the tokens that came since sequences were last penalised; return their rows of the counts.

        `last` (seats,) has the late tokens.
        """
        begins: list[Longs] = []  # of rows of the counts, for each token
        sources: list[Longs] = []  # the token, or whose it is
        found = []
        for each in rows:
            row = self._row(each)
            found.append(row)
            num_known = len(each.output_token_ids) + each.has_late_token
            if num_known == self._num_counted[row]:
                continue  # another position of the same sequence came before
            ids = each.output_token_ids[self._num_counted[row] :].astype(np.int64)
            late = np.full(int(each.has_late_token), -1 - each.seat, np.int64)
            tokens = np.concatenate((ids[ids < self._vocab_size], late))
            begins.append(np.full_like(tokens, row * self._vocab_size))
            sources.append(tokens)
            self._num_counted[row] = num_known
        if any(map(len, sources)):
            arrays = [np.concatenate(begins), np.concatenate(sources)]
            of_rows, of_tokens = upload_all(arrays, self._device)
            self._draw.count(self.counts, of_rows, of_tokens, last)
        return found

    def _row(self, each: PenalisedRow) -> int:
        row = self._row_of.setdefault(each.seat, len(self._row_of))
        if row == len(self._generation):
            self._generation.append(-1)
            self._num_counted.append(0)
            if row == len(self.counts):
                self.counts = torch.cat((self.counts, torch.zeros_like(self.counts)))
        is_again = len(each.output_token_ids) + each.has_late_token < self._num_counted[row]
        if self._generation[row] != each.generation or is_again:
            self.counts[row].zero_()
            if each.params.repetition_penalty != 1.0 and len(each.prompt_token_ids):
                prompt = np.frombuffer(each.prompt_token_ids.data, np.int32).astype(np.int64)
                ids = send(prompt[prompt < self._vocab_size], self._device)
                self.counts[row].index_fill_(0, ids, IN_PROMPT)
            self._generation[row], self._num_counted[row] = each.generation, 0
        return row


class PlannedChanges:
    """Collects what changes some rows of logits."""

    def __init__(self) -> None:
        self._columns: dict[int, list[float]] = {}  # of the plan, by row of the logits
        self._drafts: list[int] = []
        self._edits: list[tuple[int, Edits]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._columns and not self._edits

    def penalise(self, row: PenalisedRow, counts_row: int) -> None:
        """Add the penalties of a row, whose sequence has this row of the counts."""
        columns = self._of(row.row)
        columns[1], columns[3], columns[4] = counts_row, len(self._drafts), len(row.drafts)
        params = row.params
        columns[5:] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._drafts += row.drafts

    def edit(self, row: int, edits: Sequence[Edits]) -> None:
        """Add changes of single logits, without factors."""
        self._edits += [(row, each) for each in edits]

    def upload(self, masks: dict[int, Words], counts: torch.Tensor, vocab_size: int) -> DeviceChanges:
        """Send all of it to the counts' device, with the masks of rows."""
        for place, row in enumerate(masks):
            self._of(row)[2] = place
        edited, addends = self._joined_edits(vocab_size)
        words = np.stack(list(masks.values())).view(np.int32) if masks else np.empty((0, 1), np.int32)
        plan = np.array(list(self._columns.values())).reshape(-1, 8)
        drafts = np.array(self._drafts, np.int64)
        plan_, *others = upload_all([plan, drafts, words, edited, addends], counts.device)
        return DeviceChanges(plan_, counts, *others)

    def _of(self, row: int) -> list[float]:
        return self._columns.setdefault(row, [float(row), _NONE, _NONE, 0.0, 0.0, 1.0, 0.0, 0.0])

    def _joined_edits(self, vocab_size: int) -> tuple[Longs, npt.NDArray[np.float32]]:
        """Return the edits, without what would be added to forbidden tokens."""
        if not self._edits:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        rows = np.array([row for row, _ in self._edits], np.int64)
        edits = joined([each for _, each in self._edits])
        places: Longs = np.repeat(rows, [len(each) for _, each in self._edits]) * vocab_size + edits["token"]
        is_forbidden = np.isneginf(edits["addend"])
        is_left = is_forbidden | ~np.isin(places, places[is_forbidden])
        return places[is_left], edits["addend"][is_left]
