"""Layers in two KV groups, each with its own blocks, table and span, give the tokens of one group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sagellm.core import (
    KVLayout,
    OutOfMemoryError,
    PluginRegistry,
    Request,
    RequestId,
    SequenceId,
    UnsupportedModelError,
    VirtualClock,
)
from sagellm.core.tokens import pack
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.attention.naive import TorchNaiveBackend
from sagellm.engines.attention.sdpa import SDPABackend
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.engine_core.step_runner import PlannedStep, StepRunner
from sagellm.engines.forward import device_memory
from sagellm.engines.forward.torch_backend import TorchForwardBackend
from sagellm.engines.loading.load import open_model
from sagellm.engines.requests.queued_request import QueuedSequence
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.worker.inline_executor import InlineExecutor
from sagellm.engines.worker.model_runner import ModelRunner
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.worker import Worker

BLOCK_SIZE, WINDOW = 4, 8
CPU = torch.device("cpu")
PROMPTS = [list(range(100, 130)), list(range(300, 341))]
NUM_NEW = 20
FULL, SLIDING = (0, 2), (1, 3)

# What a window of tokens and a step's own block span, and no more: a sequence goes round them.
RING = WINDOW // BLOCK_SIZE + 2
FULL_BLOCKS = [list(range(20)), list(range(39, 19, -1))]
SLIDING_BLOCKS = [[5, 0, 2, 7], [1, 6, 4, 3]]


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    """A model whose layers see everything and a window in turn."""
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "qwen2",
        family="qwen2",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )


@pytest.fixture(scope="module")
def opened(alternating):
    config = EngineConfig(model={"name": str(alternating), "device": "cpu", "dtype": "float32"})
    return open_model(config.model, PluginRegistry.load())


def layouts_of(spec):
    (group,) = spec.kv_groups("float32")
    groups = (
        replace(group, layer_ids=FULL, window=None),
        replace(group, index=1, layer_ids=SLIDING, window=WINDOW),
    )
    return [KVLayout(group=each, block_size=BLOCK_SIZE) for each in groups]


def backend_of(opened, attention):
    geometry = opened.spec.geometry
    with opened.reading() as weights:
        return TorchForwardBackend(
            opened.spec,
            weights,
            device=CPU,
            dtype=torch.float32,
            attention=attention(
                num_heads=geometry.num_heads,
                num_kv_heads=geometry.num_kv_heads,
                head_dim=geometry.head_dim,
                block_size=BLOCK_SIZE,
            ),
        )


class TwoGroups:
    """Drives a worker by its steps alone, as a manager of two groups of blocks would."""

    def __init__(self, opened, attention):
        self.seats = Seats(2, block_size=BLOCK_SIZE, num_groups=2)
        runner = ModelRunner(backend_of(opened, attention), layouts_of(opened.spec), device=CPU)
        runner.initialize_kv_caches([40, 2 * RING])
        self.worker = Worker(runner, Sampler(), SeatState(2, block_size=BLOCK_SIZE, num_groups=2))
        self.steps = StepRunner(
            InlineExecutor(self.worker),
            self.seats,
            VirtualClock(),
            label="inline",
            vocab_size=opened.spec.geometry.vocab_size,
        )

    def admit(self, name, prompt):
        request = Request(request_id=RequestId(name), token_ids=pack(prompt), max_tokens=NUM_NEW)
        queued = QueuedSequence(
            SequenceId(name), request, SamplingParams(temperature=0.0, ignore_eos=True), 0, frozenset()
        )
        return self.seats.take(Sequence.of(queued), request.token_ids, [], 0)

    def step(self, seats):
        """Compute up to a block of each sequence, with new blocks where one begins."""
        known = self.seats.num_tokens[seats] - self.seats.num_computed[seats]
        num_new = np.minimum(known, BLOCK_SIZE).astype(np.int32)
        ends = (self.seats.num_computed[seats] + num_new).tolist()
        for seat, end in zip(seats.tolist(), ends, strict=True):
            for index in range(int(self.seats.lengths[0, seat]), -(-end // BLOCK_SIZE)):
                self.seats.append_blocks(seat, [FULL_BLOCKS[seat][index]])
                self.seats.append_blocks(seat, [SLIDING_BLOCKS[seat][index % RING]], group=1)
        self.steps.submit(PlannedStep(seats=seats, num_new=num_new), ())
        for result in self.steps.collect(0):
            assert result.errors == {}


@pytest.mark.parametrize("attention", [SDPABackend, TorchNaiveBackend])
def test_two_groups_with_their_own_blocks_give_the_tokens_of_one(alternating, opened, attention):
    engine = LLMEngine(
        model=str(alternating), dtype="float32", device="cpu", num_blocks=64, block_size=BLOCK_SIZE
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    expected = [list(each.outputs[0].token_ids) for each in outputs]

    two = TwoGroups(opened, attention)
    seats = np.array([two.admit(str(index), each) for index, each in enumerate(PROMPTS)], np.intp)
    ends = np.array([len(each) + NUM_NEW for each in PROMPTS])
    while len(left := seats[two.seats.num_tokens[seats] < ends[seats]]):
        two.step(left)
    tokens = [list(two.seats.token_ids(seat))[len(PROMPTS[seat]) :] for seat in seats.tolist()]
    assert tokens == expected
    for seat in seats.tolist():
        table = two.seats.block_ids(seat, 1)
        assert len(table) == len(two.seats.block_ids(seat)) > RING == len(set(table))


def test_a_group_needs_its_own_table(alternating, opened):
    two = TwoGroups(opened, SDPABackend)
    seat = two.admit("only", PROMPTS[0])
    two.step(np.array([seat], np.intp))
    state = two.worker._state
    assert (state.tables[0, seat, 0], state.tables[1, seat, 0]) == (FULL_BLOCKS[0][0], SLIDING_BLOCKS[0][0])


def test_an_update_names_group_seat_and_index():
    seats, state = Seats(3, block_size=4, num_groups=2), SeatState(3, block_size=4, num_groups=2)
    seats.append_blocks(2, [7, 8])
    seats.append_blocks(2, [1, 2, 3], group=1)
    seats.append_each(np.array([0, 2], np.intp), [5, 6], group=1)
    seats.replace_blocks({7: 9, 1: 4})  # of the first group
    updates = seats.take_block_updates()
    named = np.stack((updates.groups, updates.seats, updates.indices, updates.block_ids), axis=1).tolist()
    assert sorted(map(tuple, named)) == [
        (0, 2, 0, 9),
        (0, 2, 0, 9),
        (0, 2, 1, 8),
        (1, 0, 0, 5),
        (1, 2, 0, 1),
        (1, 2, 1, 2),
        (1, 2, 2, 3),
        (1, 2, 3, 6),
    ]
    state._set_blocks(updates)
    assert state.tables[:, 2, :4].tolist() == [[9, 8, 0, 0], [1, 2, 3, 6]] == seats.tables[:, 2, :4].tolist()
    assert seats.cut_blocks(2, 1, group=1) == [2, 3, 6]
    assert (seats.block_ids(2), seats.block_ids(2, 1)) == ([9, 8], [1])


def test_tables_of_all_groups_widen_together():
    seats = Seats(2, block_size=4, num_groups=2)
    width = seats.tables.shape[2]
    seats.append_blocks(0, [1, 2])
    seats.append_blocks(1, list(range(width + 1)), group=1)
    assert seats.block_ids(0) == [1, 2]
    assert seats.block_ids(1, 1) == list(range(width + 1))
    assert seats.tokens.shape == (2, 2 * width * 4 + 1)


def test_memory_must_hold_the_blocks_of_all_groups(opened, monkeypatch):
    layouts = layouts_of(opened.spec)
    size = layouts[0].block_bytes
    runner = ModelRunner(backend_of(opened, SDPABackend), layouts, device=CPU)
    monkeypatch.setattr(device_memory, "available_memory_bytes", lambda _: 7 * size)
    runner.initialize_kv_caches([4, 3])
    with pytest.raises(OutOfMemoryError, match=r"KV of 4 blocks of .* and 4 blocks of .*at most 3 fit"):
        runner.initialize_kv_caches([4, 4])


def test_torch_refuses_groups_whose_heads_differ(opened):
    first, second = layouts_of(opened.spec)
    second = replace(second, group=replace(second.group, num_kv_heads=1))
    with pytest.raises(UnsupportedModelError, match="one number and size of heads, not 2"):
        backend_of(opened, SDPABackend).initialize_kv_caches([first, second], [1, 1])
