"""What changes logits before they are drawn on a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.tokens import TokenIds
from sagellm.engines.sampling.draws import Edits
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.worker.masks import Words

Longs = npt.NDArray[np.int64]


def upload(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for what runs there."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def forbid_by_masks(logits: torch.Tensor, masks: dict[int, Words]) -> None:
    """Write -inf to all tokens that the masks of rows do not allow."""
    words = upload(np.stack(list(masks.values())).view(np.int32), logits.device)
    rows = upload(np.array(list(masks), np.int64), logits.device)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def make_edits(logits: torch.Tensor, rows: Sequence[int], edits: Sequence[Edits]) -> None:
    """Make edits without factors; those of a row add to no token twice."""
    row_of = np.repeat(np.array(rows, np.int64), [len(each) for each in edits])
    together = np.concatenate(list(edits))
    places: Longs = row_of * logits.shape[1] + together["token"]
    forbids = np.isneginf(together["addend"])
    flat = logits.view(-1)
    if (~forbids).any():
        where, addends = upload(places[~forbids], logits.device), together["addend"][~forbids]
        flat.index_add_(0, where, upload(np.ascontiguousarray(addends), logits.device))
    if forbids.any():
        flat.index_fill_(0, upload(places[forbids], logits.device), -torch.inf)


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

    Its row of counts is a seat's slot: it gets one when it is first penalised.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slot_of: dict[int, int] = {}  # by seat
        self._generation: list[int] = []  # of each slot, and
        self._num_counted: list[int] = []  # tokens of its output
        self._counts = torch.zeros(0, 0, dtype=torch.int32, device=device)  # (slots, vocab) in outputs
        self._is_in_prompt = torch.zeros(0, 0, dtype=torch.bool, device=device)

    def penalise(self, logits: torch.Tensor, rows: Sequence[PenalisedRow], last: torch.Tensor) -> None:
        """Change rows of logits as `apply_penalties` does; `last` (seats,) has the late tokens."""
        slots = [self._slot(each, logits.shape[1]) for each in rows]
        self._count(rows, slots, last)
        device = self._device
        where = upload(np.array([[each.row for each in rows], slots], np.int64), device)
        counts = self._counts.index_select(0, where[1])
        drafts = [(index, token) for index, each in enumerate(rows) for token in each.drafts]
        if drafts:
            cells = upload(np.array(drafts, np.int64), device)
            ones = torch.ones(len(drafts), dtype=torch.int32, device=device)
            counts.index_put_((cells[:, 0], cells[:, 1]), ones, accumulate=True)
        params = [each.params for each in rows]
        settings = upload(
            np.array([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]),
            device,
        )
        occurs = counts > 0
        seen = occurs | self._is_in_prompt.index_select(0, where[1])
        scores, repetition = logits.index_select(0, where[0]), settings[:, :1].float()
        penalised = torch.where(scores < 0, scores * repetition, scores / repetition)
        losses = settings[:, 1:2] * counts + settings[:, 2:] * occurs
        logits.index_copy_(0, where[0], torch.where(seen, penalised, scores) - losses.float())

    def _slot(self, row: PenalisedRow, vocab_size: int) -> int:
        slot = self._slot_of.setdefault(row.seat, len(self._slot_of))
        if slot == len(self._generation):
            self._generation.append(-1)
            self._num_counted.append(0)
            if slot >= len(self._counts):
                size = max(4, 2 * slot)
                grown = (
                    self._counts.new_zeros(size, vocab_size),
                    self._is_in_prompt.new_zeros(size, vocab_size),
                )
                if slot:
                    grown[0][:slot], grown[1][:slot] = self._counts, self._is_in_prompt
                self._counts, self._is_in_prompt = grown
        is_again = len(row.output_token_ids) + row.has_late_token < self._num_counted[slot]
        if self._generation[slot] != row.generation or is_again:
            self._counts[slot].zero_()
            self._is_in_prompt[slot].zero_()
            if row.params.repetition_penalty != 1.0 and len(row.prompt_token_ids):
                prompt = np.frombuffer(row.prompt_token_ids.data, np.int32).astype(np.int64)
                ids = upload(prompt[prompt < vocab_size], self._device)
                self._is_in_prompt[slot].index_fill_(0, ids, value=True)
            self._generation[slot], self._num_counted[slot] = row.generation, 0
        return slot

    def _count(self, rows: Sequence[PenalisedRow], slots: Sequence[int], last: torch.Tensor) -> None:
        """Count the tokens that came since a sequence was last penalised."""
        new: list[Longs] = []
        late: list[tuple[int, int]] = []
        width = self._counts.shape[1]
        for row, slot in zip(rows, slots, strict=True):
            ids = row.output_token_ids[self._num_counted[slot] :].astype(np.int64)
            num_known = len(row.output_token_ids) + row.has_late_token
            if num_known == self._num_counted[slot]:
                continue  # another position of the same row came before
            new.append(slot * width + ids[ids < width])
            if row.has_late_token:
                late.append((slot, row.seat))
            self._num_counted[slot] = num_known
        flat = self._counts.view(-1)
        if new and len(ids := np.concatenate(new)):
            where = upload(ids, self._device)
            flat.index_add_(0, where, torch.ones_like(where, dtype=torch.int32))
        if late:
            where = upload(np.array(late, np.int64), self._device)
            cells = where[:, 0] * width + last.index_select(0, where[:, 1])
            flat.index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))


def _settings(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _grown(table: torch.Tensor, width: int) -> torch.Tensor:
    """Return a copy with twice the rows, and at least four."""
    grown = table.new_zeros(max(4, 2 * len(table)), width)
    if len(table):
        grown[: len(table)] = table
    return grown
