"""All that a step and its output hold crosses a socket to a worker in another process, and comes back."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import socket
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
import torch

from sagellm.core import SequenceId, StepInput, StepOutput, pack
from sagellm.core.protocols.step import (
    BlockUpdates,
    BufferId,
    CopyBlocks,
    ReadBlocks,
    Runs,
    Scored,
    SeatArrival,
    TokenMasks,
    WriteBlocks,
    verify_output,
)
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.sampling.rows import BadLogitsError
from sagellm.engines.testing import make_checkpoint

BLOCK_SIZE = 8
PROMPTS = [[5, 6, 7], [9, 8, 7, 6] * 4, [30] * 9]
PARAMS = [
    SamplingParams(temperature=0.0, prompt_logprobs=2),
    SamplingParams(temperature=0.8, seed=1, logprobs=3, repetition_penalty=1.2, top_p=0.9),
    SamplingParams(temperature=1.0, logit_bias={4: 2.0}, extra_args=None, min_tokens=3),
]


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def send(connection: socket.socket, message: object) -> None:
    data = pickle.dumps(message, protocol=5)
    connection.sendall(len(data).to_bytes(8, "little") + data)


def receive(connection: socket.socket) -> Any:
    size = int.from_bytes(exactly(connection, 8), "little")
    return pickle.loads(exactly(connection, size)) if size else None  # noqa: S301  (our own process)


def exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += connection.recv(size - len(data)) or pytest.fail("the other process has gone")
    return bytes(data)


def worker_of(checkpoint: str) -> tuple[Any, int, int]:
    """Return a worker, the bytes of a block, and the size of the vocabulary."""
    torch.set_num_threads(1)
    config = EngineConfig(
        model={"name": checkpoint, "device": "cpu"},
        kv={"num_blocks": 30, "block_size": BLOCK_SIZE},
        scheduler={"max_num_seqs": 4},
    )
    engine: Any = LLMEngine(config)
    worker = engine.client.core.parts.worker
    return worker, worker.runner.layouts[0].block_bytes, engine.vocab_size


def serve(connection: socket.socket, checkpoint: str, memory_name: str) -> None:
    """Compute the steps that come; a pair is the number of a step and its masks."""
    worker, block_bytes, _ = worker_of(checkpoint)
    memory = shared_memory.SharedMemory(memory_name)
    views = [memory.buf[at : at + block_bytes] for at in (0, block_bytes)]
    worker._buffers.lend(views)
    finish: Any = None
    while (given := receive(connection)) is not None:
        if isinstance(given, StepInput):
            finish = worker.launch(given)
            if given.late_masks is not None:
                continue
        else:
            worker.add_masks(*given)
        send(connection, finish())
    worker._buffers.take_back([BufferId(0), BufferId(1)])
    for view in views:
        view.release()
    memory.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("socket"), num_hidden_layers=1))


def mask(position: int, allowed: range, vocab_size: int) -> TokenMasks:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(allowed)] = True
    return TokenMasks(ints(position), np.packbits(bits, bitorder="little").view("<u4")[None])


def arrival(seat: int, output: tuple[int, ...] = ()) -> SeatArrival:
    prompt = PROMPTS[seat]
    stops = frozenset({2, 3})
    return SeatArrival(
        seat, SequenceId(f"s{seat}"), pack([*prompt, *output]), len(prompt), PARAMS[seat], seat, stops
    )


def steps_of(vocab_size: int) -> list[tuple[StepInput, TokenMasks | None]]:
    """Steps that use every field, each with the masks that follow it."""
    blocks = [(0, 0, 1), (1, 0, 2), (1, 1, 3), (1, 2, 4), (2, 0, 5), (2, 1, 6)]  # seat, index, block
    seats, indices, ids = zip(*blocks, strict=True)
    first = StepInput(
        step=1,
        seats=ints(0, 1, 2),
        num_new=ints(3, 16, 9),
        starts=ints(0, 0, 0),
        is_sampled=np.array([True, True, True]),
        arrivals=[arrival(seat) for seat in range(3)],
        new_blocks=BlockUpdates(ints(*[0] * 6), ints(*seats), ints(*indices), ints(*ids)),
        masks=mask(2, range(40, 60), vocab_size),
        scored=[Scored(0, 0, 2, 2)],
        hidden_rows=np.array([False, True, True]),
    )
    with_drafts = StepInput(
        step=2,
        seats=ints(2, 0, 1),
        num_new=ints(3, 1, 2),
        starts=ints(9, 3, 16),
        is_sampled=np.array([True, True, True]),
        drafts=Runs(ints(41, 50, 10), ints(2, 0, 1)),
        masks=mask(3, range(70), vocab_size),
        late_masks=np.array([True, False, False]),
        kv_ops=[CopyBlocks([(2, 9)]), ReadBlocks([9, 3], [BufferId(0), BufferId(1)])],
        hidden_rows=np.array([True, False, False]),
    )
    again = StepInput(
        step=3,
        seats=ints(1),
        num_new=ints(1),
        starts=ints(16),
        is_sampled=np.array([True]),
        arrivals=[arrival(1, (7,))],
        departures=[2, 1],
        new_blocks=BlockUpdates(ints(0, 0, 0), ints(1, 1, 1), ints(0, 1, 2), ints(9, 10, 4)),
        kv_ops=[WriteBlocks([10], [BufferId(1)])],
    )
    failing = dataclasses.replace(
        again,
        step=4,
        arrivals=(),
        departures=(),
        new_blocks=None,
        kv_ops=(),
        masks=mask(0, range(0), vocab_size),
    )
    return [(first, None), (with_drafts, mask(1, range(35, 60), vocab_size)), (again, None), (failing, None)]


def check_equal(one: Any, other: Any) -> None:
    """Check that two values are equal, arrays and exceptions in them too."""
    assert type(one) is type(other)
    if dataclasses.is_dataclass(one):
        for each in dataclasses.fields(one):
            check_equal(getattr(one, each.name), getattr(other, each.name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_equal(one[key], other[key])
    elif isinstance(one, BaseException):
        assert (str(one), vars(one)) == (str(other), vars(other))
    else:
        assert one == other


def test_a_worker_behind_a_socket_gives_the_outputs_of_one_in_this_process(checkpoint: str) -> None:
    worker, block_bytes, vocab_size = worker_of(checkpoint)
    steps = steps_of(vocab_size)
    here = [bytearray(block_bytes), bytearray(block_bytes)]
    worker._buffers.lend([memoryview(each) for each in here])
    ours, theirs = socket.socketpair()
    memory = shared_memory.SharedMemory(create=True, size=2 * block_bytes)
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, checkpoint, memory.name)
    )
    process.start()
    theirs.close()
    outputs = []
    try:
        with ours:
            ours.settimeout(120)
            for step, masks in steps:
                send(ours, step)
                finish = worker.launch(step)
                if masks is not None:
                    send(ours, (step.step, masks))
                    worker.add_masks(step.step, masks)
                outputs.append(finish())
                check_equal(receive(ours), outputs[-1])
                verify_output("here", step, outputs[-1], vocab_size=vocab_size)
            assert bytes(memory.buf[: 2 * block_bytes]) == b"".join(here)
            assert any(here[0])
            ours.sendall(bytes(8))
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        memory.close()
        memory.unlink()
    check_used(StepInput, [step for step, _ in steps])
    check_used(StepOutput, outputs, "took_ns")  # of several steps, which no worker behind a socket computes
    assert isinstance(outputs[3].errors[0], BadLogitsError)
    masked = outputs[1].tokens.lists()[0]
    assert 40 <= outputs[0].tokens.lists()[2][0] < 60
    assert len(masked) == 1 or 35 <= masked[1] < 60


def check_used(kind: Any, values: list[Any], *unused: str) -> None:
    """Check that each other field of a type has something in it in one of the values."""
    for each in dataclasses.fields(kind):
        if each.name in unused:
            continue
        found = [getattr(value, each.name) for value in values]
        assert any(len(one) if hasattr(one, "__len__") else one for one in found if one is not None), (
            each.name
        )
