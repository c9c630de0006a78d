"""Turns the rows of a step into the input of a forward backend, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sagellm.core import EngineError, ForwardBackendProtocol, InputBatch, KVLayout, ModelGeometry, StepInput
from sagellm.core.protocols.attention import HiddenRows, HiddenStates, HostBatch, KVTables
from sagellm.core.protocols.step import BlockUpdates
from sagellm.engines.forward.device_memory import check_room
from sagellm.engines.loading.device_and_dtype import device_type
from sagellm.engines.sampling.draws import Logits
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.work import WorkMeter

if TYPE_CHECKING:
    import torch

    from sagellm.engines.worker.device_inputs import DeviceInputs

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
        self._inputs = (
            HostInputs(has_arrays=has_arrays) if device_type(device) == "cpu" else _device_inputs(device)
        )
        self.work = WorkMeter()

    def initialize_kv_caches(self, num_blocks: Seq[int]) -> None:
        """Allocate the KV of this many blocks of each group. Raises OutOfMemoryError if there is no room."""
        check_room(self.layouts, num_blocks, self.device)
        self.backend.initialize_kv_caches(self.layouts, num_blocks)

    def note_blocks(self, updates: BlockUpdates) -> None:
        """Have the next step read these entries of the block tables, which are in its state already."""
        self._inputs.note_blocks(updates)

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
        wanted = _wanted(step)
        arrays = [state.tokens[seat_of, positions].astype(np.int64), positions, wanted]
        arrays += [table[seat_of, blocks] * np.int64(self._block_size) + offsets for table in state.tables]
        if step.hidden_rows is not None:
            arrays.append(_asked(step, step.hidden_rows, wanted))
        width = int(np.maximum.reduce(last)) // self._block_size + 1
        given: tuple[list[Any], list[Any]] = self._inputs.take(arrays, state.tables, seats, width)
        (input_ids, position_ids, logits_indices, *rest), tables = given
        (slots, table), *more = zip(rest, tables, strict=False)
        return self._batch(
            input_ids=input_ids,
            position_ids=position_ids,
            slot_mapping=slots,
            block_tables=table,
            query_lens=num_new.tolist(),
            seq_lens=(last + 1).tolist(),
            logits_indices=logits_indices,
            more_tables=[KVTables(*each) for each in more],
            hidden=None if step.hidden_rows is None else self._hidden(rest[-1]),
        )

    def _hidden(self, indices: Any) -> Any:
        """Ask for what the head is given at some rows."""
        if self._geometry is None:
            raise EngineError("a step wants hidden states, and the model runner was made without a geometry")
        shape = (1, len(indices), self._geometry.hidden_size)
        layers = (self._geometry.num_layers,)
        if self._batch is HostBatch:
            return HiddenRows(layers=layers, indices=indices, values=np.empty(shape, np.float32))
        import torch

        values = torch.empty(shape, dtype=torch.float32, device=self.device)
        return HiddenStates(layers=layers, indices=indices, values=values)

    def execute_model(self, batch: InputBatch | HostBatch) -> Logits:
        """Run the forward pass; returns float32 logits (sampled and scored positions, vocab)."""
        forward: Callable[..., Logits] = self.backend.forward
        logits = forward(batch)
        self.work.add(batch)
        return logits


class HostInputs:
    """The input of steps on a CPU: arrays, or tensors over them."""

    def __init__(self, *, has_arrays: bool) -> None:
        self._taken: Callable[[Longs], Any] = _itself if has_arrays else _as_tensor()

    def note_blocks(self, updates: BlockUpdates) -> None:
        """Do nothing: each step takes its tables from the state."""

    def take(self, arrays: Seq[Longs], tables: Ints, seats: Ints, width: int) -> tuple[list[Any], list[Any]]:
        """Return flat arrays, and the first `width` blocks of some seats, for each KV group."""
        rows = [table[seats, :width].astype(np.int64) for table in tables]
        return [self._taken(each) for each in arrays], [self._taken(each) for each in rows]


def _itself(values: Longs) -> Longs:
    return values


def _as_tensor() -> Callable[[Longs], torch.Tensor]:
    import torch

    return torch.from_numpy


def _device_inputs(device: str | torch.device) -> DeviceInputs:
    import torch

    from sagellm.engines.worker.device_inputs import DeviceInputs

    return DeviceInputs(torch.device(device))


def _asked(step: StepInput, is_asked: npt.NDArray[np.bool_], wanted: Longs) -> Longs:
    """Return the tokens whose hidden states are wanted: the sampled positions of some rows."""
    is_asked = is_asked[step.is_sampled]
    if step.drafts is not None:
        is_asked = is_asked.repeat(step.drafts.counts[step.is_sampled] + 1)
    return wanted[: len(is_asked)][is_asked]


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
