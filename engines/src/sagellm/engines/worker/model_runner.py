"""Turns the rows of a step into the input of a forward backend, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sagellm.core import EngineError, ForwardBackendProtocol, InputBatch, KVLayout, ModelGeometry, StepInput
from sagellm.core.protocols.attention import HiddenRows, HiddenStates, HostBatch, KVTables
from sagellm.engines.forward.device_memory import check_room
from sagellm.engines.sampling.draws import Logits
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.work import WorkMeter

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class ModelRunner:
    """Builds the flat input of a step and runs the forward backend on it.

    There is a layout for each KV group, all of one block size. Without `geometry`, no step may want hidden
    states. With `has_arrays`, of a backend that takes them, input and logits are arrays instead of tensors on
    the `device`.
    """

    def __init__(
        self,
        backend: ForwardBackendProtocol,
        layouts: Seq[KVLayout],
        *,
        device: str | torch.device,
        geometry: ModelGeometry | None = None,
        has_arrays: bool = False,
    ) -> None:
        self.backend, self._geometry = backend, geometry
        self._block_size = layouts[0].block_size
        self.layouts = layouts
        self.device = device
        self._batch: type[InputBatch] | type[HostBatch] = HostBatch if has_arrays else InputBatch
        self._taken: Callable[[Longs], Any] = _itself if has_arrays else _as_tensor(device)
        self.work = WorkMeter()
        self._counted: Longs = np.arange(0)

    def initialize_kv_caches(self, num_blocks: Seq[int]) -> None:
        """Allocate the KV of this many blocks of each group. Raises OutOfMemoryError if there is no room."""
        check_room(self.layouts, num_blocks, self.device)
        self.backend.initialize_kv_caches(self.layouts, num_blocks)

    def prepare_inputs(self, step: StepInput, state: SeatState) -> InputBatch | HostBatch:
        """Concatenate the tokens of all rows.

        Logits are requested at the last known token and the drafts of each sampled row, and after these at
        the positions of prompts that are scored.
        """
        seats, num_new = step.seats, step.num_new
        if np.count_nonzero(num_new == 1) == len(seats):
            seat_of, positions = seats, step.starts.astype(np.int64)
            last = positions  # of each row
        else:
            ends = num_new.cumsum(dtype=np.int64)
            rows = np.repeat(np.arange(len(seats)), num_new)
            positions = np.arange(len(rows)) + (step.starts + num_new - ends)[rows]
            seat_of, last = seats[rows], positions[ends - 1]
        blocks, offsets = np.divmod(positions, self._block_size)
        last_blocks = last // self._block_size
        first, *more = (
            KVTables(
                self._taken(table[seat_of, blocks] * np.int64(self._block_size) + offsets),
                self._taken(self._used(table, seats, last_blocks)),
            )
            for table in state.tables
        )
        wanted = _wanted(step)
        return self._batch(
            input_ids=self._taken(state.tokens[seat_of, positions].astype(np.int64)),
            position_ids=self._taken(positions),
            slot_mapping=first.slot_mapping,
            block_tables=first.block_tables,
            query_lens=num_new.tolist(),
            seq_lens=(last + 1).tolist(),
            logits_indices=self._taken(wanted),
            more_tables=more,
            hidden=None if step.hidden_rows is None else self._hidden(step, step.hidden_rows, wanted),
        )

    def _hidden(self, step: StepInput, is_asked: npt.NDArray[np.bool_], wanted: Longs) -> Any:
        """Ask for what the head is given at the sampled positions of some rows."""
        if self._geometry is None:
            raise EngineError("a step wants hidden states, and the model runner was made without a geometry")
        is_asked = is_asked[step.is_sampled]
        if step.drafts is not None:
            is_asked = is_asked.repeat(step.drafts.counts[step.is_sampled] + 1)
        indices = wanted[: len(is_asked)][is_asked]
        shape = (1, len(indices), self._geometry.hidden_size)
        layers = (self._geometry.num_layers,)
        if self._batch is HostBatch:
            return HiddenRows(layers=layers, indices=indices, values=np.empty(shape, np.float32))
        import torch

        values = torch.empty(shape, dtype=torch.float32, device=self.device)
        return HiddenStates(layers=layers, indices=self._taken(indices), values=values)

    def _used(self, table: Ints, seats: Ints, last_blocks: Longs) -> Longs:
        """Return the blocks of each row up to its last one; others are 0."""
        width = int(np.maximum.reduce(last_blocks)) + 1
        tables = table[seats, :width].astype(np.int64)
        is_left = self._numbers(width) > last_blocks[:, None]
        if np.count_nonzero(is_left):
            tables[is_left] = 0  # what earlier occupants left
        return tables

    def _numbers(self, count: int) -> Longs:
        if len(self._counted) < count:
            self._counted = np.arange(2 * count)
        return self._counted[:count]

    def execute_model(self, batch: InputBatch | HostBatch) -> Logits:
        """Run the forward pass; returns float32 logits (sampled and scored positions, vocab)."""
        forward: Callable[..., Logits] = self.backend.forward
        logits = forward(batch)
        self.work.add(batch)
        return logits


def _itself(values: Longs) -> Longs:
    return values


def _as_tensor(device: str | torch.device) -> Callable[[Longs], torch.Tensor]:
    """Return what copies an array to a device without waiting for what runs there."""
    import torch

    target = torch.device(device)
    if target.type == "cpu":
        return torch.from_numpy
    if target.type != "cuda":
        return lambda values: torch.from_numpy(values).to(target, non_blocking=True)
    # Copied from pageable memory, it would wait for steps in flight.
    return lambda values: torch.from_numpy(values).pin_memory().to(target, non_blocking=True)


def _wanted(step: StepInput) -> Longs:
    """Return the flat indices of the tokens whose logits are wanted."""
    ends = step.num_new.cumsum(dtype=np.int64)
    last = ends[step.is_sampled] - 1
    if step.drafts is not None:
        num_drafts = step.drafts.counts[step.is_sampled]
        stops = (num_drafts + 1).cumsum()
        last = np.repeat(last - stops + 1, num_drafts + 1) + np.arange(len(last) + int(num_drafts.sum()))
    if not step.scored:
        return last
    stops = step.starts + step.num_new
    scored = [np.arange(each.start, each.stop) + (ends[each.row] - stops[each.row]) for each in step.scored]
    return np.concatenate([last, *scored])
