"""A server that answers slowly, wrongly or not at all never delays callers of the tier."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from sagellm.core import Randomness, StoreKey, SystemClock
from sagellm.core.protocols.kv_tier import KVTierProtocol, TierOutcome, TierRequest
from sagellm.core.testing.kv_tier import BLOCK_BYTES, get, make_data, make_header, put
from sagellm.kvmgr.kv_pool.tiers import resp
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend
from sagellm.kvmgr.kv_pool.tiers.background import BackgroundTier
from sagellm.kvmgr.kv_pool.tiers.providers import redis_tier
from sagellm.kvmgr.kv_pool.tiers.redis import RedisTier
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage

FUZZ_SEED = int(os.environ.get("SAGELLM_FUZZ_SEED", "0"))
TIMEOUT_S = 0.8
LONGEST_CALL_S = 0.6
"""Of a machine that is busy with other tests; alone it is under a millisecond."""


class FakeServer:
    """Speaks enough RESP on TCP: SCAN, SET, GETRANGE, DEL. `drip_s` is the time between two of its bytes."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.drip_s = 0.0
        self.answer: Callable[[list[bytes]], bytes] = self._answer
        self.closes_after: Callable[[bytes], bool] = lambda data: False
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_open = False
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as reading:
            while self._is_open and (line := reading.readline()):
                command = []
                for _ in range(int(line[1:])):
                    size = int(reading.readline()[1:])
                    command.append(reading.read(size + 2)[:-2])
                self._send(connection, self.answer(command))

    def _send(self, connection: socket.socket, data: bytes) -> None:
        if not self.drip_s:
            connection.sendall(data)
            if self.closes_after(data):
                raise ConnectionError
            return
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(self.drip_s)

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
    return redis_tier(1 << 20, url=server.url, store_key=StoreKey(bytes(32)), timeout_s=TIMEOUT_S, **options)


def watch(tier: KVTierProtocol, request: TierRequest) -> tuple[TierOutcome, float, float]:
    """Return the outcome, after how many seconds it was there, and how long the longest call took."""
    longest_s, begun_s = 0.0, time.monotonic()

    def timed(call: Callable[[], object]) -> object:
        nonlocal longest_s
        started_s = time.monotonic()
        result = call()
        longest_s = max(longest_s, time.monotonic() - started_s)
        return result

    timed(lambda: tier.submit([request]))
    while not (results := timed(tier.poll)):
        timed(lambda: tier.contains(request.header.key))
        timed(tier.metrics)
        timed(lambda: tier.touch([request.header.key]))
        time.sleep(0.001)
        assert time.monotonic() - begun_s < 10
    ((_, (outcome,)),) = results
    return outcome, time.monotonic() - begun_s, longest_s


def asked(number: int) -> TierRequest:
    return TierRequest("get", make_header(number), memoryview(bytearray(BLOCK_BYTES)))


def test_a_dripping_server_fails_at_an_absolute_deadline_and_no_call_waits_for_it(server):
    tier = make_tier(server)
    assert put(tier, make_header(1), make_data(1)) == "done"
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    server.drip_s = 0.05  # each byte comes long before a timeout of recv
    outcome, took_s, longest_s = watch(tier, asked(1))
    assert outcome == "failed"
    assert took_s < TIMEOUT_S + 2
    assert longest_s < LONGEST_CALL_S
    assert not tier.contains(make_header(1).key)
    tier.close()


def test_a_dripping_server_delays_no_start(server):
    server.values = {b"sagellm:%d" % number: b"x" for number in range(100)}
    server.drip_s = 0.05
    begun_s = time.monotonic()
    tier = make_tier(server)
    assert time.monotonic() - begun_s < TIMEOUT_S + 2
    assert put(tier, make_header(1), make_data(1)) == "failed"
    tier.close()


class SkewedClock(SystemClock):
    """The machine's clock, and what it was moved on by."""

    skew_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.skew_ns


def test_a_dripping_server_is_retried_after_growing_pauses(server):
    server.drip_s, clock = 0.02, SkewedClock()
    tier = RedisTier(1 << 20, url=server.url, store_key=StoreKey(bytes(32)), timeout_s=0.03, clock=clock)
    tried = []
    for second in range(32):
        before = server.num_connections
        put(tier, make_header(1), make_data(1))
        if server.num_connections > before:
            tried.append(second)
        clock.skew_ns += 1_000_000_000
    assert tried == [0, 1, 3, 7, 15, 31]
    server.drip_s = 0
    clock.skew_ns += 64_000_000_000
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.drip_s = 0.02
    before = server.num_connections
    for number in range(3):
        put(tier, make_header(10 + number), make_data(1))
        clock.skew_ns += 1_000_000_000
    assert server.num_connections == before + 1  # a second again, as the one before was in order
    tier.close()


def test_a_server_that_returns_is_reconnected_and_scanned_without_a_request(server):
    tier = make_tier(server)
    assert put(tier, make_header(1), make_data(1)) == "done"
    server.drip_s = 0.05
    assert get(tier, make_header(1))[0] == "failed"
    server.drip_s = 0
    deadline_s = time.monotonic() + 5
    while not tier.contains(make_header(1).key):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    tier.close()


def test_a_block_found_late_is_a_hit_of_the_tiered_storage(server):
    first = make_tier(server)
    assert put(first, make_header(1), make_data(1)) == "done"
    first.close()
    server.drip_s = 0.01
    late = make_tier(server)
    storage = TieredKVStorage({"host": BackendTier(DDRBackend(1 << 16)), "redis": late})
    assert not storage.contains(make_header(1).key)
    server.drip_s = 0
    deadline_s = time.monotonic() + 5
    while not storage.contains(make_header(1).key):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert get(storage, make_header(1)) == ("done", bytes(make_data(1)))
    storage.check_integrity()
    storage.close()


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
    outcome, took_s, _ = watch(tier, asked(1))
    assert outcome in ("failed", "missing", "corrupt")
    assert took_s < TIMEOUT_S + 2
    assert put(tier, make_header(2), make_data(2)) != "corrupt"
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
@pytest.mark.parametrize("num_replies", [1_000, pytest.param(150_000, marks=pytest.mark.full)])
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


def test_a_late_operation_of_a_stuck_device_touches_no_buffer_and_stores_nothing_wrong():
    device = Stuck()
    tier = BackgroundTier(device, timeout_s=1)
    assert put(tier, make_header(1), make_data(1)) == "done"
    device.is_free.clear()
    wanted, given = memoryview(bytearray(BLOCK_BYTES)), make_data(2)
    assert watch(tier, TierRequest("get", make_header(1), wanted))[0] == "failed"
    wanted[:] = mine = make_data(99)
    outcome, took_s, _ = watch(tier, TierRequest("put", make_header(2), given))
    assert (outcome, took_s < 0.9) == ("failed", True)  # at once, as the device is stuck
    assert not tier.contains(make_header(1).key)
    device.is_free.set()
    while not tier.contains(make_header(1).key):
        time.sleep(0.001)
    assert wanted == mine
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    assert get(tier, make_header(2))[0] == "missing"
    assert tier.metrics().num_failed == 2
    tier.close()


def test_a_put_that_times_out_stores_its_data_or_nothing():
    device = Stuck()
    tier = BackgroundTier(device, timeout_s=1)
    device.is_free.clear()
    data = make_data(1)
    assert watch(tier, TierRequest("put", make_header(1), data))[0] == "failed"
    data[:] = make_data(2)  # the buffer is the caller's again, and has another block by now
    device.is_free.set()
    while not tier.contains(make_header(1).key):
        time.sleep(0.001)
    assert get(tier, make_header(1)) == ("done", bytes(make_data(1)))
    tier.close()


def test_what_a_stuck_device_fails_is_told_by_name_and_ever_more_rarely(caplog):
    device = Stuck()
    tier = BackgroundTier(device, timeout_s=0.1, label="KV file x")
    tier.submit([])  # nothing is asked, and nothing fails
    assert caplog.messages == []
    device.is_free.clear()
    for number in range(8):
        put(tier, make_header(number), make_data(number))
    counts = [int(message.split("; ")[1].split()[0]) for message in caplog.messages]
    assert counts == [1, 2, 4, 8]
    assert all(
        message.startswith("the KV file x has not answered within 0.1 s") for message in caplog.messages
    )
    device.is_free.set()
    tier.close()


def test_closing_waits_no_longer_than_a_second_for_a_stuck_device():
    device = Stuck()
    tier = BackgroundTier(device, timeout_s=30)
    device.is_free.clear()
    tier.submit([asked(1)])
    begun_s = time.monotonic()
    tier.close()
    assert time.monotonic() - begun_s < 5
    device.is_free.set()
