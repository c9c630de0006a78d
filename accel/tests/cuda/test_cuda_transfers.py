"""What copies of blocks wait for, as recorded by what stands in for streams: a CPU has none."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sagellm.accel.cuda.support import IS_INTERPRETED
from sagellm.accel.cuda.transfers import BlockTransfers

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="the streams of a GPU are its own")
NUM_BLOCKS, NUM_BYTES = 40, 52


class Stream:
    """Has the names of the events that it has waited for."""

    def __init__(self, name):
        self.name, self.waited = name, []

    def wait_event(self, event):
        self.waited.append(event.name)


class Event:
    """Named after what was launched when it was last recorded."""

    def __init__(self, streams):
        self._streams, self.name = streams, None

    def record(self, stream):
        self.name = f"{stream.name}: {self._streams.launched}"

    def query(self):
        return self.name in self._streams.over

    def synchronize(self):
        if self.name is not None:
            self._streams.host_waited.append(self.name)


class RecordedStreams:
    """Stands in for streams and events of a device, and records what they would wait for."""

    def __init__(self):
        self.launched = "nothing"  # what the test says is launched last
        self.over, self.host_waited = set(), []
        self.made, self.used, self.kept = [], [], []
        self.computing = Stream("computing")

    def stream(self):
        self.made.append(Stream(f"own {len(self.made)}"))
        return self.made[-1]

    def event(self):
        return Event(self)

    def current(self):
        return self.computing

    def keep(self, tensor, stream):
        self.kept.append((len(tensor), stream.name))

    @contextmanager
    def use(self, stream):
        self.used.append(stream.name)
        yield


@pytest.fixture
def streams():
    return RecordedStreams()


@pytest.fixture
def transfers(streams):
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (NUM_BLOCKS, NUM_BYTES), dtype=torch.uint8, generator=generator)
    return BlockTransfers(memory, streams)


def launch(streams, transfers, *steps):
    for step in steps:
        streams.launched = step
        transfers.after_step()


def read(transfers, block_ids, num_in_flight):
    buffers = [bytearray(NUM_BYTES) for _ in block_ids]
    transfers.read(block_ids, [memoryview(each) for each in buffers], num_in_flight)
    assert buffers == [bytearray(transfers._memory[each].numpy()) for each in block_ids]


@pytest.mark.parametrize(
    ("num_in_flight", "waited"), [(0, "step 4"), (1, "step 3"), (2, "step 2"), (3, "step 2")]
)
def test_a_read_waits_for_the_steps_that_may_have_written_its_blocks(
    streams, transfers, num_in_flight, waited
):
    launch(streams, transfers, "step 1", "step 2", "step 3", "step 4")  # the first is forgotten
    read(transfers, [3, 1], num_in_flight)
    assert streams.made[0].waited == [f"computing: {waited}"]
    assert streams.computing.waited == []
    assert set(streams.used) == {"own 0"}


def test_a_read_before_any_step_waits_for_none(streams, transfers):
    read(transfers, [3, 1], 1)
    assert streams.made[0].waited == []


def test_a_read_waits_for_copies_and_writes_of_its_own_blocks_until_they_are_over(streams, transfers):
    launch(streams, transfers, "step 1", "step 2")
    streams.launched = "copy"
    transfers.after_change([5, 6])
    read(transfers, [4], 1)
    assert streams.made[0].waited == ["computing: step 1"]
    read(transfers, [4, 5, 6], 1)
    assert streams.made[0].waited[1:] == ["computing: step 1", "computing: copy"]
    streams.launched = "write"
    transfers.write([9], [memoryview(bytearray(range(NUM_BYTES)))])
    read(transfers, [9], 1)
    assert streams.made[0].waited[3:] == ["computing: step 1", "computing: write"]
    streams.over = {"computing: copy", "computing: write"}
    transfers.after_change([7])
    read(transfers, [5, 9], 1)
    assert streams.made[0].waited[5:] == ["computing: step 1"]


def test_a_write_travels_beside_steps_and_ends_between_them_and_the_next(streams, transfers):
    launch(streams, transfers, "step 1", "step 2")
    data = [bytearray([each]) * NUM_BYTES for each in range(20)]  # more than are staged
    transfers.write(list(range(20)), [memoryview(each) for each in data])
    assert [bytearray(transfers._memory[each].numpy()) for each in range(20)] == data
    assert streams.made[1].waited == []
    assert streams.computing.waited == ["own 1: step 2"]
    assert streams.kept == [(20, "computing")]
    assert all(each.startswith("own 1") for each in streams.host_waited)


@pytest.mark.parametrize("num_blocks", [0, 1, 8, 9, 37])
def test_blocks_arrive_in_pieces_one_launch_and_one_copy_each(streams, transfers, num_blocks):
    read(transfers, list(range(num_blocks))[::-1], 0)
    num_pieces = -(-num_blocks // 8)
    assert streams.used == ["own 0"] * num_pieces
    assert len(streams.host_waited) == num_pieces
