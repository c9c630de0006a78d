"""One tenant's job delays no other: parameters cross once, each tenant has a connection, all take turns."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sagellm.core import Runtime, SequenceId, Tenant, TokenOutput
from sagellm.core.protocols.engine import RequestLimits, SampledToken
from sagellm.engines import InputProcessor, SamplingParams
from sagellm.engines.requests.queued_request import QueuedRequest, QueuedSequence
from sagellm.server.remote import CoreServer, links
from sagellm.server.remote.core_process import listen
from sagellm.server.remote.links import Link, Links
from sagellm.server.remote.messages import (
    Abort,
    Add,
    Call,
    FrameReader,
    FromCore,
    Hello,
    Reply,
    Step,
    ToCore,
    encode,
)

LIMITS = RequestLimits(vocab_size=1000, max_model_len=4096, num_blocks=4096, block_size=16)
LARGE = SamplingParams(bad_words_token_ids=[[(7 * i + j) % 1000 for j in range(1000)] for i in range(64)])


def job(num_prompts: int, params: SamplingParams | None = None, *, tenant: str = "a") -> list[QueuedRequest]:
    inputs = InputProcessor(None, LIMITS, Runtime.virtual())
    ids = [f"{tenant}{number}" for number in range(num_prompts)]
    prompts = [[5, 6, 7]] * num_prompts
    return list(inputs.process_job(prompts, params or SamplingParams(), ids, tenant=Tenant(tenant)))


def test_parameters_cross_the_link_once_and_are_one_object_for_all_prompts():
    [arrived] = FrameReader(ToCore).feed(frame := encode(Add.of(job(400, LARGE))))
    assert len(frame) < len(encode(Add.of(job(1, LARGE)))) + 400 * 300
    requests = list(arrived.requests())
    assert requests == job(400, LARGE)
    assert {id(request.params) for request in requests} == {id(arrived.params)}


def test_continuations_that_score_no_prompt_share_their_parameters_too():
    params = SamplingParams(n=3, prompt_logprobs=1)
    sequences = [each for request in job(4, params) for each in request.sequences]
    assert len({id(each.params) for each in sequences}) == 2


class StubCore:
    """Takes 0.1 ms of `clock_ns` to queue a sequence, which runs until it is aborted."""

    def __init__(self) -> None:
        self.clock_ns = 0
        self.live: dict[SequenceId, QueuedSequence] = {}
        self.num_steps = 0

    def add(self, sequence: QueuedSequence) -> None:
        self.clock_ns += 100_000
        self.live[sequence.sequence_id] = sequence

    def abort(self, sequence_ids, *, finish_reason="abort") -> None:
        for each in sequence_ids:
            self.live.pop(each, None)

    def step(self) -> list[TokenOutput]:
        self.num_steps += 1
        return []

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def use_idle_time(self) -> bool:
        return False

    def report_progress(self, beat) -> None:
        pass

    def close(self) -> None:
        pass


class StubServer(CoreServer):
    def now_ns(self) -> int:
        return self._core.clock_ns


@pytest.fixture
def core() -> StubCore:
    return StubCore()


@pytest.fixture
def server(core, tmp_path) -> Iterator[StubServer]:
    server = StubServer(core, listen(tmp_path / "s"), Hello({}, LIMITS, SamplingParams(), 1), {})
    yield server
    server.close()


def connected(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(path))
    return peer


def test_a_request_is_queued_within_two_steps_beside_a_job_of_hundreds(server, core, tmp_path):
    big, small = connected(tmp_path / "s"), connected(tmp_path / "s")
    server.turn(0)
    server.turn(0)
    frame = encode(Add.of(job(400, LARGE)))
    big.setblocking(False)
    while frame:
        with suppress(BlockingIOError):
            frame = frame[big.send(frame) :]
        server.turn(0)
    while not core.live:
        server.turn(0)
    num_steps = core.num_steps
    small.sendall(encode(Add.of(job(1, tenant="b"))))
    while "b0#0" not in core.live:
        server.turn(0)
    assert core.num_steps - num_steps <= 2
    assert 2 < len(core.live) < 200, "most of the job waits"
    while len(core.live) < 401:
        before_ns = core.clock_ns
        server.turn(0)
        assert core.clock_ns - before_ns <= 5_000_000, "and none of it delays a step for longer"
    assert len({id(each.params) for each in core.live.values()}) == 2
    big.close()
    server.turn(0)
    assert list(core.live) == ["b0#0"]


def test_many_jobs_of_others_delay_a_request_by_no_more_steps_than_one(server, core, tmp_path):
    peers = [connected(tmp_path / "s") for _ in range(41)]
    for _ in peers:
        server.turn(0)
    for number, peer in enumerate(peers[:40]):
        peer.sendall(encode(Add.of(job(100, tenant=f"t{number}-"))))
    while len(core.live) < 80:
        server.turn(0)
    num_steps = core.num_steps
    peers[40].sendall(encode(Add.of(job(1, tenant="b"))))
    while "b0#0" not in core.live:
        server.turn(0)
    assert core.num_steps - num_steps <= 2


@pytest.fixture
def listener(tmp_path) -> Iterator[socket.socket]:
    """A core that does not read: connections succeed, and what is sent to them stays in their buffers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        yield listener


def received(peer: socket.socket, reader: FrameReader | None = None) -> list[object]:
    """Return the messages that have come to the core on one connection."""
    reader = reader or FrameReader(ToCore)
    messages: list[object] = []
    peer.setblocking(False)
    with suppress(BlockingIOError):
        while data := peer.recv(1 << 20):
            messages += reader.feed(data)
    return messages


async def greeted(listener: socket.socket) -> socket.socket:
    """Take the next connection, as the core does, and return its end."""
    peer, _ = await asyncio.to_thread(listener.accept)
    peer.sendall(encode(Hello({}, LIMITS, SamplingParams(), 1)))
    return peer


async def opened(front: Links, listener: socket.socket) -> socket.socket:
    """Open the connection for calls and return the core's end of it."""
    await front.open()
    return await greeted(listener)


async def reached(front: Links, listener: socket.socket, tenant: str) -> socket.socket:
    """Open a tenant's connection and return the core's end of it."""
    reaching = asyncio.create_task(front.reach(tenant))
    peer = await greeted(listener)
    await reaching
    return peer


def test_a_tenant_with_much_unread_waits_and_delays_no_other(listener, tmp_path):
    async def use():
        front = Links(tmp_path / "s", print)
        calls = await opened(front, listener)
        a = await reached(front, listener, "a")
        num_sent = 0
        while front._tenants["a"]._takes_more.is_set():
            front.add(job(10, LARGE))
            num_sent += 1
        assert num_sent < 10
        waiting = asyncio.create_task(front.reach("a"))
        b = await reached(front, listener, "b")
        front.add(job(1, tenant="b"))
        front.calls.send(Call(1, "ping", {}))
        assert [type(each) for each in received(calls) + received(b)] == [Call, Add]
        assert not waiting.done()
        reader, num_read = FrameReader(ToCore), 0
        while num_read < num_sent:
            num_read += len(received(a, reader))
            await asyncio.sleep(0)
        await waiting
        front.close()

    asyncio.run(asyncio.wait_for(use(), 60))


def test_an_abort_follows_its_request_and_one_that_has_ended_is_not_aborted(listener, tmp_path):
    async def use():
        front = Links(tmp_path / "s", print)
        _calls = await opened(front, listener)
        a, b = [await reached(front, listener, tenant) for tenant in ("a", "b")]
        for tenant in ("a", "b"):
            front.add(job(2, tenant=tenant))
        b.sendall(encode(Step([TokenOutput(SequenceId("b0#0"), [7], "stop")])))
        while "b0#0" in front._owner:
            await asyncio.sleep(0)
        front.abort(["a1#0", "b0#0", "b1#0", "never sent"], "abort")
        aborts = [
            [each.sequence_ids for each in received(peer) if isinstance(each, Abort)] for peer in (a, b)
        ]
        assert aborts == [[["a1#0"]], [["b1#0"]]]
        front.close()

    asyncio.run(asyncio.wait_for(use(), 60))


@pytest.mark.parametrize("lacks", ["room", "descriptors", "connections of the core"])
def test_where_no_further_connection_is_had_tenants_share_one(listener, tmp_path, monkeypatch, lacks):
    async def use():
        front = Links(tmp_path / "s", print)
        peers = [await opened(front, listener)]
        peers += [await reached(front, listener, tenant) for tenant in ("a", "b")]
        if lacks == "descriptors":
            monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", refuse)
        reaching = asyncio.create_task(front.reach("c"))
        if lacks == "connections of the core":
            (await asyncio.to_thread(listener.accept))[0].close()
        await reaching
        front.add(job(1, tenant="c"))
        others = {front._tenants["a"], front._tenants["b"]} if lacks == "room" else {front.calls}
        assert front._tenants["c"] in others
        assert sum(len(received(peer)) for peer in peers) == 1
        assert not front.lost.done(), "the core is alive"
        front.close()

    async def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(links, "_MAX_TENANTS", 2 if lacks == "room" else 128)
    asyncio.run(asyncio.wait_for(use(), 60))


def test_who_leaves_while_a_connection_is_opened_neither_loses_it_nor_the_core(listener, tmp_path):
    async def use():
        front = Links(tmp_path / "s", print)
        calls = await opened(front, listener)
        leaving = asyncio.create_task(front.reach("a"))
        peer, _ = await asyncio.to_thread(listener.accept)
        while "a" not in front._tenants:
            await asyncio.sleep(0)
        leaving.cancel()
        staying = asyncio.create_task(front.reach("a"))
        peer.sendall(encode(Hello({}, LIMITS, SamplingParams(), 1)))
        await staying
        assert leaving.cancelled()
        front.add(job(1))
        assert [len(received(each)) for each in (calls, peer)] == [0, 1]
        assert not front.lost.done()
        front.close()

    asyncio.run(asyncio.wait_for(use(), 60))


class Transport(asyncio.Transport):
    is_paused = False

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def test_each_message_of_the_core_is_a_turn_of_the_event_loop():
    """An answer's 256 scored tokens take 10 ms, and several such messages may come at once."""

    async def use():
        heard: list[FromCore] = []
        link = Link(heard.append, asyncio.get_running_loop().create_future())
        transport = Transport()
        link.connection_made(transport)
        scores = [SampledToken(7, -0.5, [], 1)]
        step = encode(Step([TokenOutput(SequenceId("a#0"), [7], logprobs=scores)]))
        first = encode(Hello({}, LIMITS, SamplingParams(), 1))
        link.data_received(first + step * 3 + encode(Reply(1)) + step[:5])
        turns = []
        while transport.is_paused:
            turns.append(len(heard))
            await asyncio.sleep(0)
        assert turns == [0, 1, 2, 3]
        assert [type(each) for each in heard] == [Step, Step, Step, Reply]
        link.data_received(step[5:] + step * 2)
        assert len(heard) == 5
        link.connection_lost(None)
        assert len(heard) == 7, "what has come whole is not lost"

    asyncio.run(use())
