"""Block tables on a device follow those of the host by their changes alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sagellm.core.protocols.step import BlockUpdates
from sagellm.engines.worker import device_inputs
from sagellm.engines.worker.device_inputs import DeviceInputs

CPU = torch.device("cpu")


class Tables:
    """Tables of the host that change at random, beside their copy."""

    def __init__(self, num_groups, num_seats, width, seed=0):
        self.rng = np.random.default_rng(seed)
        self.host = np.zeros((num_groups, num_seats, width), np.int32)
        self.inputs = DeviceInputs(CPU)

    def change(self, number):
        groups, seats, indices = (self.rng.integers(0, size, number, np.int32) for size in self.host.shape)
        ids = self.rng.integers(0, 1 << 20, number, np.int32)
        self.host[groups, seats, indices] = ids
        self.inputs.note_blocks(BlockUpdates(groups, seats, indices, ids))

    def widen(self):
        wide = np.zeros((*self.host.shape[:2], 2 * self.host.shape[2]), np.int32)
        wide[:, :, : self.host.shape[2]] = self.host
        self.host = wide

    def take(self, arrays=(), width=None):
        seats = self.rng.permutation(self.host.shape[1])[: self.rng.integers(1, self.host.shape[1] + 1)]
        width = width or int(self.rng.integers(1, self.host.shape[2] + 1))
        taken, tables = self.inputs.take(arrays, self.host, seats.astype(np.int32), width)
        for table, expected in zip(tables, self.host, strict=True):
            assert table.tolist() == expected[seats, :width].tolist()
        return taken


@pytest.mark.parametrize("seed", range(3))
def test_they_equal_the_hosts_after_any_changes(seed):
    tables = Tables(2, 5, 3, seed)
    for _ in range(100):
        for _ in range(tables.rng.integers(0, 3)):  # more than one, after steps that computed nothing
            tables.change(int(tables.rng.integers(1, 8)))
        if tables.rng.random() < 0.04:
            tables.widen()
        tables.take()


def test_a_step_is_one_copy_of_what_changed(monkeypatch):
    copied = []

    def upload(arrays, device):
        copied.append(sum(each.nbytes for each in arrays))
        return send(arrays, device)

    send = device_inputs.upload
    monkeypatch.setattr(device_inputs, "upload", upload)
    tables = Tables(1, 256, 2048)
    tables.take()
    copied.clear()
    tables.change(16)
    ids, wanted = np.arange(7), np.arange(3)
    taken = tables.take([ids, wanted], width=2048)
    assert [each.tolist() for each in taken] == [ids.tolist(), wanted.tolist()]
    (num_bytes,) = copied
    assert num_bytes <= 8 * (7 + 3 + 256 + 2 * 16), "the tables have 4 MiB"


def test_what_a_failed_copy_had_is_copied_again(monkeypatch):
    tables = Tables(1, 4, 4)
    tables.take()
    tables.change(5)

    def fail(arrays, device):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(device_inputs, "upload", fail)
        with pytest.raises(MemoryError):
            tables.take()
    tables.take()
