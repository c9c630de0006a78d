"""A server that answers slowly, wrongly or not at all never delays callers of the tier."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from sagellm.core import Randomness, Runtime, VirtualClock
from sagellm.core.protocols.kv_tier import KVTierProtocol, TierOutcome, TierRequest
from sagellm.core.store_key import StoreKey
from sagellm.kvmgr.kv_pool.tiers import resp
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend
from sagellm.kvmgr.kv_pool.tiers.background import BackgroundTier
from sagellm.kvmgr.kv_pool.tiers.providers import redis_tier
from sagellm.kvmgr.kv_pool.tiers.redis import RedisTier
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage
from sagellm.testing.kv_tier import BLOCK_BYTES, get, make_data, make_header, put
from sagellm.testing.patience import PATIENCE_S, wait_until

FUZZ_SEED = int(os.environ.get("SAGELLM_FUZZ_SEED", "0"))
TIMEOUT_S = PATIENCE_S
"""Of a clock that a server moves when it is late: where nothing is, no machine is too slow for it."""


class FakeServer:
    """Speaks enough RESP on TCP: SCAN, SET, GETRANGE, DEL.

    One that is late sends a byte when the time is up, and no other; a silent one sends nothing for now.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.values: dict[bytes, bytes] = {}
        self.is_late = False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answer: Callable[[list[bytes]], bytes] = self._answer
        self.closes_after: Callable[[bytes], bool] = lambda data: False
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.may_answer.set()
        self._listener.close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as reading:
            while line := reading.readline():
                command = []
                for _ in range(int(line[1:])):
                    size = int(reading.readline()[1:])
                    command.append(reading.read(size + 2)[:-2])
                self.may_answer.wait()
                self._send(connection, self.answer(command))

    def _send(self, connection: socket.socket, data: bytes) -> None:
        if self.is_late:
            self.clock.advance_ns(round((TIMEOUT_S + 0.001) * 1e9))
            connection.sendall(data[:1])
            connection.recv(1)  # until it is given up
            raise ConnectionError
        connection.sendall(data)
        if self.closes_after(data):
            raise ConnectionError

    def _answer(self, command: list[bytes]) -> bytes:
        match command:
            case [b"SCAN", *_]:
                names = b"".join(b"$%d\r\n%s\r\n" % (len(name), name) for name in self.values)
                return b"*2\r\n$1\r\n0\r\n*%d\r\n%s" % (len(self.values), names)
            case [b"SET", name, value]:
                self.values[name] = value
                return b"+OK\r\n"
            case [b"GETRANGE", name, start, end]:
                found = self.values.get(name, b"")[int(start) : int(end) + 1]
                return b"$%d\r\n%s\r\n" % (len(found), found)
            case [b"DEL", name]:
                return b":%d\r\n" % (self.values.pop(name, None) is not None)
        raise AssertionError(command)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def make_tier(server: FakeServer, **options: float) -> KVTierProtocol:
    runtime = replace(Runtime.system(), clock=server.clock)
    return redis_tier(
        1 << 20,
        url=server.url,
        store_key=StoreKey(bytes(32)),
        timeout_s=TIMEOUT_S,
        runtime=runtime,
        **options,
    )


def outcome_of(
    tier: KVTierProtocol, request: TierRequest, clock: VirtualClock, *, takes_s: float = 0.0
) -> TierOutcome:
    """Return the outcome that comes while so much time passes between two calls of the tier."""

    def results():
        clock.advance_ns(round(takes_s * 1e9))
        tier.contains(request.header.key)
        tier.metrics()
        tier.touch([request.header.key])
        return tier.poll()

    tier.submit([request])
    ((_, (outcome,)),) = wait_until(results)
    return outcome


def asked(number: int) -> TierRequest:
    return TierRequest("get", make_header(number), memoryview(bytearray(BLOCK_BYTES)))


def test_a_late_server_fails_at_an_absolute_deadline_though_it_sends_something(server):
    tier = make_tier(server)
    assert put(tier, make_header(1), make_data(1)) == "done"
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    server.is_late = True
    assert outcome_of(tier, asked(1), server.clock) == "failed"
    wait_until(lambda: not tier.contains(make_header(1).key))
    tier.close()


def test_no_call_waits_for_a_silent_server(server):
    tier = make_tier(server)
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.may_answer.clear()
    for number in range(2, 22):
        tier.submit([asked(1), TierRequest("put", make_header(number), make_data(number))])
        assert tier.poll() == []
        assert tier.contains(make_header(1).key)
        assert tier.metrics().num_blocks == 1
        assert tier.touch([make_header(1).key]) == [False]
    results = []

    def have_failed():
        server.clock.advance_ns(round(TIMEOUT_S * 1e9))
        results.extend(tier.poll())
        return len(results) == 20

    wait_until(have_failed)
    assert {result.outcomes for result in results} == {("failed", "failed")}
    assert not tier.contains(make_header(1).key)
    tier.close()


def test_a_silent_server_delays_no_start(server):
    server.values = {b"sagellm:%d" % number: b"x" for number in range(100)}
    server.may_answer.clear()
    tier = make_tier(server)
    request = TierRequest("put", make_header(1), make_data(1))
    assert outcome_of(tier, request, server.clock, takes_s=TIMEOUT_S) == "failed"
    tier.close()


def test_a_late_server_is_retried_after_growing_pauses(server):
    server.is_late, clock = True, server.clock
    tier = RedisTier(1 << 20, url=server.url, store_key=StoreKey(bytes(32)), timeout_s=TIMEOUT_S, clock=clock)

    def is_tried(number: int) -> bool:
        before = len(server.connections)
        assert put(tier, make_header(number), make_data(1)) == "failed"
        return len(server.connections) > before

    pauses, num_s = [], 0
    for _ in range(80):
        if is_tried(1):
            pauses.append(num_s)
            num_s = 0
        clock.advance_ns(1_000_000_000)
        num_s += 1
    assert pauses == [0, 1, 2, 4, 8, 16, 32]
    server.is_late = False
    clock.advance_ns(64_000_000_000)
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.is_late = True
    assert not is_tried(10)
    clock.advance_ns(1_000_000_000)
    assert is_tried(11), "a second again, as the one before was in order"
    tier.close()


def test_a_server_that_returns_is_reconnected_and_scanned_without_a_request(server):
    tier = make_tier(server)
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.is_late = True
    assert outcome_of(tier, asked(1), server.clock) == "failed"
    wait_until(lambda: not tier.contains(make_header(1).key))
    server.is_late = False
    server.clock.advance_ns(2_000_000_000)
    wait_until(lambda: tier.contains(make_header(1).key))
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    tier.close()


def test_a_block_found_late_is_a_hit_of_the_tiered_storage(server):
    first = make_tier(server)
    assert put(first, make_header(1), make_data(1)) == "done"
    first.close()
    server.may_answer.clear()
    late = make_tier(server)
    storage = TieredKVStorage({"host": BackendTier(DDRBackend(1 << 16)), "redis": late})
    assert not storage.contains(make_header(1).key)
    server.may_answer.set()
    wait_until(lambda: storage.contains(make_header(1).key))
    assert get(storage, make_header(1)) == ("done", bytes(make_data(1)))
    storage.check_integrity()
    storage.close()


def test_requests_at_once_are_not_measured_one_upon_another(server):
    """Sixteen that the server answers in a millisecond each, as they are sent together."""
    tier, answer, numbers = make_tier(server), server.answer, range(16)

    def take_time(command: list[bytes]) -> bytes:
        server.clock.advance_ns(1_000_000 if command[0] == b"GETRANGE" else 0)
        return answer(command)

    for number in numbers:
        assert put(tier, make_header(number), make_data(number)) == "done"
    server.answer = take_time
    tickets = {tier.submit([asked(number)]) for number in numbers}
    wait_until(lambda: tickets.difference_update(each.ticket for each in tier.poll()) or not tickets)
    assert tier.get_cost_ns([make_header(number).key for number in numbers]) < 4 * 16_000_000
    tier.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\r\n",
        b"$2000000000\r\n",
        b"$-7\r\n",
        b"$9999999999999999999999999\r\n",
        b"$1_0\r\n",
        b"*1000000000\r\n",
        b"*2\r\n" * 2000,
        b"+" + b"x" * 100_000,
        b"$5\r\nabcdefgh\r\n",
        b"!7\r\nnothing\r\n",
        b"-ERR " + b"\x1b[31m\xff" * 50 + b"\r\n",
        b":12\r\n",
        b"\x00\xff\xfe",
    ],
)
def test_any_reply_is_a_failure_or_a_miss_and_takes_little_memory(server, reply):
    tier = make_tier(server)
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.answer = lambda command: reply
    assert outcome_of(tier, asked(1), server.clock, takes_s=1) in ("failed", "missing", "corrupt")
    request = TierRequest("put", make_header(2), make_data(2))
    assert outcome_of(tier, request, server.clock, takes_s=1) != "corrupt"
    server.close()  # it may be waited for
    tier.check_integrity()
    tier.close()


def mutated(reply: bytes, random) -> bytes:
    """Change a reply in one to three places."""
    changed = bytearray(reply)
    for _ in range(random.randint(1, 3)):
        place, kind = random.randrange(len(changed)), random.random()
        if kind < 0.6:
            changed[place] ^= 1 << random.randrange(8)
        elif kind < 0.8:
            del changed[place : place + random.randint(1, 20)]
            changed += b"\r\n"
        else:
            changed[place:place] = random.choice((b"$", b"*9\r\n", b"\r\n", b"$-1\r\n", b"0"))
    return bytes(changed)


def test_mutated_replies_give_no_wrong_block(server):
    random, tier = Randomness(FUZZ_SEED).stream("replies"), make_tier(server)
    sound, is_mutated = server.answer, True
    spoilt: set[bytes] = set()
    server.closes_after = (
        spoilt.__contains__
    )  # so that the test does not wait for the rest of a raised length

    def answer(command: list[bytes]) -> bytes:
        reply = sound(command)
        if is_mutated:
            reply = mutated(reply, random)
            spoilt.clear()
            spoilt.add(reply)
        return reply

    server.answer = answer
    inner = tier.tier
    for number in range(300):
        inner._retry_ns = -(1 << 62)  # no pauses between failures
        is_mutated = number % 3 > 0
        put(tier, make_header(number % 5), make_data(number % 5))
        outcome, data = get(tier, make_header(number % 5))
        assert outcome != "done" or data == bytes(make_data(number % 5))
    tier.check_integrity()
    tier.close()


class Wire:
    """In the place of a socket: replies are there at once, in pieces; after the last one it is closed."""

    def __init__(self, answer: Callable[[list[bytes]], bytes], random) -> None:
        self._answer, self._random = answer, random
        self._replies = bytearray()

    def settimeout(self, _timeout_s: float) -> None:
        pass

    def send(self, data: memoryview) -> int:
        reading = io.BytesIO(data)
        while line := reading.readline():
            sizes = (int(reading.readline()[1:]) for _ in range(int(line[1:])))
            self._replies += self._answer([reading.read(size + 2)[:-2] for size in sizes])
        return len(data)

    def recv(self, size: int) -> bytes:
        size = min(size, self._random.choice((1, 7, 64, 1 << 16)))
        data = bytes(self._replies[:size])
        del self._replies[:size]
        return data

    def recv_into(self, buffer: memoryview) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_replies", [1_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_many_mutated_replies_give_no_wrong_block(server, monkeypatch, num_replies):
    random = Randomness(FUZZ_SEED).stream("many replies")
    num_mutated, is_mutated = 0, True
    outcomes: Counter[str] = Counter()

    def answer(command: list[bytes]) -> bytes:
        nonlocal num_mutated
        num_mutated += is_mutated
        reply = server._answer(command)
        return mutated(reply, random) if is_mutated else reply

    monkeypatch.setattr(resp, "_connect", lambda *_: Wire(answer, random))
    tier = RedisTier(1 << 20, url=server.url, store_key=StoreKey(bytes(32)))
    headers, blocks = [make_header(n) for n in range(5)], [bytes(make_data(n)) for n in range(5)]
    while num_mutated < num_replies:
        number = random.randrange(5)
        tier._retry_ns = -(1 << 62)  # no pauses between failures
        is_mutated = random.random() < 0.4
        tier.search()
        put(tier, headers[number], memoryview(blocks[number]))
        is_mutated = random.random() < 0.8
        outcome, data = get(tier, headers[number])
        assert outcome != "done" or data == blocks[number], num_mutated
        outcomes[outcome] += 1
    tier.check_integrity()
    tier.close()
    assert min(outcomes[each] for each in ("done", "corrupt", "missing", "failed")) > num_replies / 100


class Stuck(BackendTier):
    """A device that does not answer until released."""

    def __init__(self) -> None:
        super().__init__(DDRBackend(1 << 20))
        self.is_free = threading.Event()
        self.is_free.set()

    def submit(self, requests):
        self.is_free.wait()
        return super().submit(requests)


def make_stuck() -> tuple[Stuck, BackgroundTier, VirtualClock]:
    device, clock = Stuck(), VirtualClock()
    return device, BackgroundTier(device, timeout_s=1, clock=clock, label="KV file x"), clock


def test_a_late_operation_of_a_stuck_device_touches_no_buffer_and_stores_nothing_wrong():
    device, tier, clock = make_stuck()
    assert put(tier, make_header(1), make_data(1)) == "done"
    device.is_free.clear()
    wanted, given = memoryview(bytearray(BLOCK_BYTES)), make_data(2)
    assert outcome_of(tier, TierRequest("get", make_header(1), wanted), clock, takes_s=0.1) == "failed"
    wanted[:] = mine = make_data(99)
    tier.submit([TierRequest("put", make_header(2), given)])
    assert [result.outcomes for result in tier.poll()] == [("failed",)], "at once, as the device is stuck"
    assert not tier.contains(make_header(1).key)
    device.is_free.set()
    wait_until(lambda: tier.contains(make_header(1).key))
    assert wanted == mine
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    assert get(tier, make_header(2))[0] == "missing"
    assert tier.metrics().num_failed == 2
    tier.close()


def test_a_put_that_times_out_stores_its_data_or_nothing():
    device, tier, clock = make_stuck()
    device.is_free.clear()
    data = make_data(1)
    assert outcome_of(tier, TierRequest("put", make_header(1), data), clock, takes_s=0.1) == "failed"
    data[:] = make_data(2)  # the buffer is the caller's again, and has another block by now
    device.is_free.set()
    wait_until(lambda: tier.contains(make_header(1).key))
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    tier.close()


def test_what_a_stuck_device_fails_is_told_by_name_and_ever_more_rarely(caplog):
    device, tier, clock = make_stuck()
    tier.submit([])  # nothing is asked, and nothing fails
    assert caplog.messages == []
    tier.poll()
    device.is_free.clear()
    for number in range(8):
        request = TierRequest("put", make_header(number), make_data(number))
        assert outcome_of(tier, request, clock, takes_s=0.1) == "failed"
    counts = [int(message.split("; ")[1].split()[0]) for message in caplog.messages]
    assert counts == [1, 2, 4, 8]
    assert all(message.startswith("the KV file x has not answered within 1 s") for message in caplog.messages)
    device.is_free.set()
    tier.close()


def test_closing_does_not_wait_for_a_stuck_device():
    device, tier, _ = make_stuck()
    device.is_free.clear()
    tier.submit([asked(1)])
    tier.close()
    device.is_free.set()
