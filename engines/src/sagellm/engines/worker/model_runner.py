"""Turns the rows of a step into tensors and tensors into logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import ForwardBackendProtocol, InputBatch, KVLayout, StepInput
from sagellm.engines.forward.device_memory import check_room
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.work import WorkMeter

Longs = npt.NDArray[np.int64]


class ModelRunner:
    """Builds the flat input of a step and runs the forward backend on it."""

    def __init__(self, backend: ForwardBackendProtocol, *, layout: KVLayout, device: torch.device) -> None:
        self.backend = backend
        self._block_size = layout.block_size
        self._layout = layout
        self.device = device
        self.work = WorkMeter()

    def initialize_kv_caches(self, num_blocks: int) -> None:
        """Allocate the KV of `num_blocks` blocks. Raises OutOfMemoryError if there is no room."""
        check_room(self._layout, num_blocks, self.device)
        self.backend.initialize_kv_caches([self._layout], [num_blocks])

    def prepare_inputs(self, step: StepInput, state: SeatState, num_drafts: Seq[int]) -> InputBatch:
        """Concatenate the tokens of all rows.

        Logits are requested at the last known token and the drafts (`num_drafts`) of each sampled row, and
        after these at the positions of prompts that are scored.
        """
        size, seats = self._block_size, step.seats
        num_new, starts = step.num_new.astype(np.int64), step.starts.astype(np.int64)
        stops, ends = starts + num_new, np.cumsum(num_new)
        rows = np.repeat(np.arange(len(seats)), num_new)
        positions = np.arange(len(rows)) + (stops - ends)[rows]
        seat_of = seats[rows]
        slots = state.tables[seat_of, positions // size].astype(np.int64) * size + positions % size
        num_blocks = -(-stops // size)
        tables = state.tables[seats, : num_blocks.max()].astype(np.int64)
        tables[np.arange(tables.shape[1]) >= num_blocks[:, None]] = 0  # what earlier occupants left
        return InputBatch(
            input_ids=self._tensor(state.tokens[seat_of, positions].astype(np.int64)),
            position_ids=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(tables),
            query_lens=num_new.tolist(),
            seq_lens=stops.tolist(),
            logits_indices=self._tensor(_wanted(step, ends, stops, num_drafts)),
        )

    def execute_model(self, batch: InputBatch) -> torch.Tensor:
        """Run the forward pass; returns float32 logits (sampled and scored positions, vocab)."""
        logits = self.backend.forward(batch)
        self.work.add(batch)
        return logits

    def _tensor(self, values: Longs) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # copied from pageable memory, it would wait for steps in flight
        return tensor.to(self.device, non_blocking=True)


def _wanted(step: StepInput, ends: Longs, stops: Longs, num_drafts: Seq[int]) -> Longs:
    """Return the flat indices of the tokens whose logits are wanted."""
    last = ends[step.is_sampled] - 1
    parts = [last]
    if any(num_drafts):
        parts = [
            np.arange(end - number, end + 1) for end, number in zip(last.tolist(), num_drafts, strict=True)
        ]
    parts += [np.arange(each.start, each.stop) + (ends[each.row] - stops[each.row]) for each in step.scored]
    return np.concatenate(parts)
