"""The input of steps on a device: one copy for each step, and block tables that stay there."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.uploads import upload
from sagellm.core.protocols.step import BlockUpdates

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class DeviceInputs:
    """Copies what a step needs to a device in one piece; of the block tables, only what has changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables = torch.empty(0, 0, 0, dtype=torch.int64, device=device)  # (groups, seats, blocks)
        self._changed: list[BlockUpdates] = []

    def note_blocks(self, updates: BlockUpdates) -> None:
        """Take these entries of the tables along with the next step."""
        self._changed.append(updates)

    def take(
        self, arrays: Seq[Longs], tables: Ints, seats: Ints, width: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return flat arrays on the device, and the first `width` blocks of some seats, for each KV group.

        `tables` (groups, seats, blocks) are those of the host.
        """
        if self._tables.shape != tables.shape:  # the first ones, or wider ones
            (flat,) = upload([tables.reshape(-1).astype(np.int64)], self._device)
            self._tables = flat.view(tables.shape)
            self._changed.clear()
        places = [_places(each, tables.shape) for each in self._changed]
        changed = np.concatenate([np.empty(0, np.int64), *places])
        new_ids = tables.reshape(-1)[changed].astype(np.int64)
        *taken, rows, places_there, ids = upload(
            [*arrays, seats.astype(np.int64), changed, new_ids], self._device
        )
        if len(changed):
            self._tables.view(-1).index_copy_(0, places_there, ids)
            self._changed.clear()
        return taken, [table[:, :width].index_select(0, rows) for table in self._tables]


def _places(updates: BlockUpdates, shape: tuple[int, ...]) -> Longs:
    """Return the flat places of entries in tables of this shape."""
    _, num_seats, width = shape
    rows = updates.groups.astype(np.int64) * num_seats + updates.seats
    return rows * width + updates.indices
