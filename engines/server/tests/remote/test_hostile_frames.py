"""Whatever a peer sends ends its own connection at most: others get their tokens, and no block is lost.

`corpus` has frames that once ended a core, or left it with what it could not use; each is sent in each run.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sagellm.core import EngineError, Namespace, VirtualClock
from sagellm.engines import SamplingParams
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.server.remote import CoreServer
from sagellm.server.remote.core_process import listen
from sagellm.server.remote.frames import FrameReader, encode
from sagellm.server.remote.messages import Abort, Add, Call, FromCore, Hello, Step
from sagellm.server.remote.operations import core_operations

CORPUS = sorted((Path(__file__).parent / "corpus").glob("to-core-*.bin"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FRAMES_OF_A_CONNECTION = 8
NUM_PEERS = 32
FRAMES_BETWEEN_CANARIES = 1000


def framed(*requests: QueuedRequest) -> bytes:
    """Return the frame of a job."""
    return encode(Add.of(requests))


class Peer:
    """A client in the server's own thread: the server takes its turns when this one waits."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(core.path))
        self._socket.setblocking(False)
        self._reader = FrameReader(FromCore)
        self.messages: list[object] = []
        self.is_closed = False
        core.exchange()

    def send(self, frame: bytes) -> None:
        """Send a frame, or as much of it as is read before the connection ends."""
        while frame and not self.is_closed:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                self.receive()
            except OSError:
                self.is_closed = True

    def receive(self, *, steps: bool = True) -> list[object]:
        """Let the server take a turn, with a step or without, and read what came."""
        if steps:
            self._core.server.turn(0)
        else:
            self._core.exchange()
        try:
            while data := self._socket.recv(1 << 20):
                self.messages += self._reader.feed(data)
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        return self.messages

    def close(self) -> None:
        self._socket.close()
        self._core.exchange()


class Core:
    """A core that is served, with what its requests are to give."""

    def __init__(self, engine, folder: Path) -> None:
        self.engine, self.path = engine, folder / "core.sock"
        core, inputs = engine.client.core, engine.driver.input
        self.expected = engine.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
        hello = Hello({}, inputs.limits, SamplingParams(), os.getpid())
        self.server = CoreServer(core, listen(self.path), hello, core_operations(core))

    def request(self, prompt, params=GREEDY, **options) -> QueuedRequest:
        return self.engine.driver.input.process_request(prompt, params, **options)

    def exchange(self) -> None:
        """Let the server take its turn but for the step."""
        self.server._exchange(0)
        self.server._handle_backlog()

    def canary(self) -> list[int]:
        """Return the tokens of a request that another peer sends."""
        peer, tokens = Peer(self), []
        peer.send(framed(self.request([5, 6, 7])))
        for _ in range(2000):
            steps = [message for message in peer.receive() if isinstance(message, Step)]
            outputs = [output for step in steps for output in step.outputs]
            if outputs and outputs[-1].finish_reason is not None:
                tokens = [token for output in outputs for token in output.token_ids]
                break
            assert not peer.is_closed
        peer.close()
        return tokens


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Keep the thousands of warnings from being collected."""
    monkeypatch.setattr(logging.getLogger("sagellm"), "disabled", True)
    for name in ("core_server", "links"):
        monkeypatch.setattr(logging.getLogger(f"sagellm.server.remote.{name}"), "disabled", True)


@pytest.fixture(scope="module")
def core(make_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    engine = make_engine(num_blocks=64, block_size=8, kv_save_folder=str(folder / "saves"))
    core = Core(engine, folder)
    yield core
    core.server.close()


@pytest.fixture(scope="module")
def valid(core) -> list[bytes]:
    """Frames of each message and of each operation."""
    params = SamplingParams(
        n=3,
        temperature=0.7,
        seed=1,
        max_tokens=5,
        stop_token_ids=[9],
        logit_bias={5: 1.5},
        bad_words_token_ids=[[7, 8]],
        allowed_token_ids=range(50),
        prompt_logprobs=2,
        logprobs=3,
    )
    plain = core.request([5, 6, 7], request_id="a")
    many = core.request(
        list(range(20, 60)), params, request_id="b", namespace=Namespace("t", "s"), priority=2
    )
    calls = [
        Call(1, "metrics", {}),
        Call(2, "cache_why", {"request": "a"}),
        Call(3, "cache_pin", {"token_ids": [5, 6, 7], "namespace": ["t", "s", ""], "ttl_s": 5.0}),
        Call(4, "cache_unpin", {"token_ids": [5, 6], "num_tokens": 2}),
        Call(5, "cache_evict", {"num_blocks": 1}),
        Call(6, "cache_save", {"name": "monday", "tenant": "t"}),
        Call(7, "cache_load", {"name": "monday"}),
        Call(8, "cache_go_on", {"number": 1}),
        Call(9, "cache_delete", {"name": "monday"}),
        Call(10, "pool_compact", {}),
    ]
    other = core.request([7] * 9, params, request_id="c")
    messages = [
        *([Add.of([plain])] * 3),
        *([Add.of([many, other])] * 4),
        Abort(plain.sequence_ids + many.sequence_ids, "abort"),
        *calls,
    ]
    return [encode(message) for message in messages]


def attack(core: Core, frames: Iterable[bytes], all_blocks_are_back) -> int:
    """Send frames over several connections in turns; return how many connections they ended.

    A step follows each round, so that what was let in runs, beside what the others sent.
    """
    peers: dict[int, Peer] = {}
    num_sent = Counter[int]()
    num_ended = 0

    def end_all() -> None:
        for peer in peers.values():
            peer.close()
        peers.clear()
        check(core, all_blocks_are_back)

    for number, frame in enumerate(frames, start=1):
        place = number % NUM_PEERS
        peer = peers[place] if place in peers else peers.setdefault(place, Peer(core))
        peer.send(frame)
        peer.receive(steps=place == 0)
        num_sent[place] += 1
        if peer.is_closed or num_sent[place] == FRAMES_OF_A_CONNECTION:
            num_ended += peer.is_closed
            peers.pop(place).close()
            del num_sent[place]
        if number % FRAMES_BETWEEN_CANARIES == 0:
            end_all()
    end_all()
    return num_ended


def check(core: Core, all_blocks_are_back) -> None:
    assert core.canary() == core.expected
    core.server.turn(0)
    assert not core.engine.client.core.has_unfinished()
    operations = core_operations(core.engine.client.core)
    operations["cache_unpin_all"]()  # what a valid call has pinned
    msgspec.json.encode(operations["metrics"]())
    assert all_blocks_are_back(core.engine)


def test_frames_that_once_did_harm_do_none(core, all_blocks_are_back):
    assert CORPUS
    attack(core, [path.read_bytes() for path in CORPUS], all_blocks_are_back)


def test_mutated_frames_end_only_their_connection(core, valid, mutator, all_blocks_are_back):
    mutate = mutator(valid, seed=1)
    assert attack(core, (mutate() for _ in range(3000)), all_blocks_are_back) > 300


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_mutated_frames_end_only_their_connection(core, valid, mutator, all_blocks_are_back):
    mutate = mutator(valid, seed=2)
    assert attack(core, (mutate() for _ in range(100_000)), all_blocks_are_back) > 6_000


def add(core: Core, **changes: object) -> bytes:
    """Return the frame of a request, with fields that no front would send."""
    queued = core.request([5, 6, 7], request_id="bad")
    own = {name: value for name, value in changes.items() if name in queued.__slots__}
    inner = {name: value for name, value in changes.items() if name not in own}
    return framed(replace(queued, request=replace(queued.request, **inner), **own))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": b"\1\0\0"},
        {"token_ids": [5, 6]},
        {"token_ids": "text"},
        {"token_ids": b""},
        {"token_ids": b"\xff\xff\xff\xff"},
        {"token_ids": (1 << 30).to_bytes(4, "little")},
        {"token_ids": b"\1\0\0\0" * 100_000},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": 100_000},
        {"arrival_ns": -1},
        {"request_id": "x" * 2000},
        {"namespace": Namespace("t" * 2000)},
        {"stop_token_ids": frozenset({-7})},
        {"seed": -1},
        {"seed": 1 << 63},
        {"request_id": ""},
        {"priority": 1.5},
        {"namespace": [1]},
        {"params": SamplingParams(allowed_token_ids=[10**9])},
        {"params": SamplingParams(extra_args={"x": 1})},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_request_that_no_front_sends_ends_its_connection_before_it_is_queued(core, changes):
    peer = Peer(core)
    peer.send(add(core, **changes))
    for _ in range(3):  # the job, then its request, and on a slow machine only one of them in a turn
        peer.receive()
    assert peer.is_closed
    assert not core.engine.client.core.has_unfinished()


def test_text_that_is_not_utf8_ends_only_its_connection(core):
    peer = Peer(core)
    peer.send(encode(Call(1, "metrics", {})).replace(b"metrics", b"metr\xff\xfes"))
    peer.receive()
    assert peer.is_closed
    assert core.canary() == core.expected


class Panic(BaseException):
    """What pyo3 raises when a Rust extension panics."""


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_request_whose_third_sequence_is_refused_queues_none(core, monkeypatch, all_blocks_are_back, error):
    engine_core, num_added = core.engine.client.core, 0
    real = engine_core.add

    def refuse_the_third(sequence):
        nonlocal num_added
        num_added += 1
        if num_added == 3:
            raise error("no more")
        real(sequence)

    peer = Peer(core)
    with monkeypatch.context() as patched:
        patched.setattr(engine_core, "add", refuse_the_third)
        peer.send(framed(core.request([5, 6], SamplingParams(n=4, max_tokens=9))))
        for _ in range(3):
            peer.receive()
    steps = [message for message in peer.receive() if isinstance(message, Step)]
    assert [(output.finish_reason, output.error) for output in steps[0].outputs] == [
        ("error", f"{error.__name__}: no more")
    ] * 4
    assert len(steps) == 1
    assert not peer.is_closed
    peer.close()
    check(core, all_blocks_are_back)


def test_a_panic_in_an_operation_ends_only_its_connection(core):
    def fail():
        raise Panic

    core.server._operations["panic"] = fail
    peer = Peer(core)
    peer.send(encode(Call(1, "panic", {})))
    peer.receive()
    del core.server._operations["panic"]
    assert peer.is_closed
    assert core.canary() == core.expected


def run(peer: Peer) -> None:
    """Let the server take the turns that a job of one request needs, on a slow machine too."""
    for _ in range(3):
        peer.receive()


def test_an_engine_that_exits_in_a_step_is_said_to(core, monkeypatch, all_blocks_are_back):
    def leave():
        raise SystemExit(0)

    peer = Peer(core)
    with monkeypatch.context() as patched:
        patched.setattr(core.engine.client.core, "step", leave)
        peer.send(framed(core.request([5, 6])))
        with pytest.raises(EngineError, match=r"the engine called sys\.exit\(0\) in a step"):
            run(peer)
    peer.close()
    check(core, all_blocks_are_back)


def test_a_peer_cannot_abort_the_sequences_of_another(core):
    one, two = Peer(core), Peer(core)
    request = core.request([5, 6, 7])
    one.send(framed(request))
    for _ in range(3):
        one.receive()
    two.send(encode(Abort(request.sequence_ids, "abort")))
    for _ in range(50):
        two.receive()
        one.receive()
    outputs = [output for step in one.messages if isinstance(step, Step) for output in step.outputs]
    assert [token for output in outputs for token in output.token_ids] == core.expected
    one.close()
    two.close()


@pytest.fixture
def slow_calls(core, monkeypatch):
    """Have each call of "metrics" take a millisecond of a clock of the server's own; count them."""
    clock, calls = VirtualClock(), []
    metrics = core.server._operations["metrics"]

    def take_time():
        clock.advance_ns(1_000_000)
        calls.append(clock.now_ns())
        return metrics()

    monkeypatch.setattr(core.server, "now_ns", clock.now_ns)
    monkeypatch.setitem(core.server._operations, "metrics", take_time)
    return calls


def test_a_peer_that_reads_no_answers_delays_no_other_and_takes_little_memory(core, slow_calls):
    """Once its answers are not read, its calls stay in the socket."""
    flood = socket.socket(socket.AF_UNIX)
    flood.connect(str(core.path))
    core.server.turn(0)
    flood.setblocking(False)
    frame = encode(Call(1, "metrics", {})) * 1000
    pending, num_refused = b"", 0
    most_calls = 0
    while num_refused < 3:  # in a row: neither side's buffer takes more
        try:
            pending = pending or frame
            pending = pending[flood.send(pending) :]
            num_refused = 0
        except BlockingIOError:
            num_refused += 1
        slow_calls.clear()
        core.server.turn(0)
        most_calls = max(most_calls, len(slow_calls))
    assert most_calls == 5, "so many milliseconds has a turn"
    (connection,) = core.server._connections
    assert len(connection.unsent) < 4 << 20
    assert core.canary() == core.expected
    flood.close()
    core.server.turn(0)


def test_a_flood_of_calls_takes_turns_with_the_requests_of_others(core, slow_calls):
    """260,000 calls once kept a request waiting for 20 s."""
    flood, num_calls = Peer(core), 400
    flood.send(encode(Call(1, "metrics", {})) * num_calls)
    assert core.canary() == core.expected
    assert 0 < len(slow_calls) < num_calls / 2, "the canary waited for some of them, not for all"
    for _ in range(num_calls):
        if len(flood.messages) > num_calls:  # Hello and each Reply
            break
        flood.receive()
    assert len(slow_calls) == num_calls
    flood.close()
