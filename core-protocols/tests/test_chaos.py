"""Faults on demand: nothing without the variable, and with it the same ones for the same seed."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from sagellm.core.chaos import (
    CHAOS,
    VARIABLE,
    Chaos,
    flaky,
    flaky_socket,
    flaky_vector,
)

NUM_CALLS = 2000


def wild(name: str) -> Chaos:
    """Return the first seed under which a point is wild."""
    for seed in range(1, 100):
        point = Chaos(str(seed)).point(name, errno.EIO)
        if any(point.draw().error for _ in range(1000)):
            return Chaos(str(seed))
    raise AssertionError("no seed does anything")


def test_without_the_variable_a_mark_returns_what_it_was_given():
    assert CHAOS is None
    assert flaky("a", errno.EIO)(len) is len
    assert flaky_vector("b")(os.preadv) is os.preadv
    with socket.socket() as given:
        assert flaky_socket("d", given) is given


@pytest.mark.parametrize("seed", ["0", "-1", "1.", "on", "true", "7 ", "1e3", ".5", "٣", "9" * 19])
def test_an_invalid_seed_injects_nothing(seed, caplog):
    with caplog.at_level(logging.WARNING):
        assert Chaos.of({VARIABLE: seed}) is None
    assert f"{VARIABLE}={seed!r} is not a seed" in caplog.text


def test_an_empty_variable_counts_as_not_set(caplog):
    assert Chaos.of({VARIABLE: ""}) is None
    assert caplog.text == ""


def test_a_seed_reproduces_its_faults():
    def injections(seed: str, name: str) -> list[str]:
        point = Chaos(seed).point(name, errno.EIO, TimeoutError)
        return [repr(point.draw()) for _ in range(NUM_CALLS)]

    name = "file.read"
    seed = wild(name).seed
    assert injections(seed, name) == injections(seed, name)
    assert injections(seed, name) != injections(f"{seed}.1", name)
    assert injections(seed, name) != injections(seed, "file.write")


def test_every_kind_of_fault_happens_and_most_calls_are_whole():
    chaos = wild("a")
    point = chaos.point("a", errno.ECONNRESET)
    injections = [point.draw() for _ in range(NUM_CALLS)]
    errors = [injection.error for injection in injections if injection.error]
    assert {type(error) for error in errors} == {ConnectionResetError}
    assert 0 < len(errors) < NUM_CALLS / 10
    assert 0 < sum(injection.delay_s is not None for injection in injections) < NUM_CALLS / 4
    sizes = {injection.size(1 << 20) for injection in injections}
    assert {1, 2, 3, 1 << 20} <= sizes
    assert min(sizes) == 1


def test_one_point_in_three_is_calm():
    chaos = Chaos("1")
    calm = 0
    for number in range(300):
        point = chaos.point(f"point {number}", errno.EIO)
        injections = [point.draw() for _ in range(50)]
        calm += not any(injection.share or injection.error or injection.delay_s for injection in injections)
    assert 70 < calm < 130


def test_a_function_fails_before_it_has_any_effect():
    chaos, done = wild("a"), []
    work = flaky("a", errno.ENOSPC, chaos=chaos)(done.append)
    failed = 0
    for number in range(NUM_CALLS):
        try:
            work(number)
        except OSError:
            failed += 1
            assert number not in done
    assert (len(done), chaos.injected()["a OSError"]) == (NUM_CALLS - failed, failed)
    assert failed


def test_the_first_calls_are_spared():
    chaos = wild("a")
    point = chaos.point("a", errno.EIO, num_spared=NUM_CALLS)
    assert not any(point.draw().error for _ in range(NUM_CALLS))


def test_a_coroutine_function_stays_one():
    chaos = wild("a")

    @flaky("a", errno.ECONNREFUSED, chaos=chaos)
    async def work() -> int:
        return 1

    async def main() -> int:
        done = 0
        for _ in range(300):
            with suppress(ConnectionRefusedError):
                done += await work()
        return done

    num_done = asyncio.run(main())
    assert num_done == 300 - chaos.injected()["a ConnectionRefusedError"]
    assert chaos.injected()["a delay"]


def test_a_vector_is_read_in_part_and_at_the_right_offset(tmp_path):
    path = tmp_path / "file"
    data = os.urandom(5000)
    path.write_bytes(data)
    read = flaky_vector("a", chaos=wild("a"))(os.preadv)
    descriptor = os.open(path, os.O_RDONLY)
    counts = set()
    for _ in range(50):
        first, second = bytearray(1000), bytearray(3000)
        count = read(descriptor, [memoryview(first), memoryview(second)], 500)
        assert (first + second)[:count] == data[500 : 500 + count]
        counts.add(count)
    os.close(descriptor)
    assert min(counts) >= 1
    assert len(counts) > 5


def test_a_socket_keeps_the_bytes_and_their_order():
    chaos = wild("a.recv")
    listener = flaky_socket("a", socket.create_server(("127.0.0.1", 0)), chaos=chaos)
    with listener, socket.create_connection(listener.getsockname()) as sending:
        peer = None
        while peer is None:
            with suppress(OSError):  # ECONNABORTED, EMFILE
                peer, _ = listener.accept()
        with peer:
            data = os.urandom(20_000)
            sending.sendall(data)
            received = b""
            while len(received) < len(data):
                try:
                    received += peer.recv(4096)
                except ConnectionResetError:  # of the injected kind: the real one still works
                    continue
            assert received == data
            num_sent = 0
            while num_sent < len(data):
                try:
                    num_sent += peer.send(data[num_sent:])
                except (BrokenPipeError, ConnectionResetError):
                    continue
            received = b""
            while len(received) < len(data):
                received += sending.recv(1 << 16)
            assert received == data
    assert chaos.injected()["a.recv short"]


def test_a_non_blocking_socket_sometimes_has_no_data():
    chaos = wild("a.recv")
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with flaky_socket("a", ours, chaos=chaos) as flaky_one, theirs:
        assert flaky_one.gettimeout() == 0
        blocked = 0
        for _ in range(300):
            theirs.send(b"x")
            while True:
                try:
                    assert flaky_one.recv(1) == b"x"
                    break
                except BlockingIOError:
                    blocked += 1
                except ConnectionResetError:
                    pass
        assert blocked == chaos.injected()["a.recv early return"] > 0


def test_a_process_logs_its_seed_and_what_it_injected():
    source = "from sagellm.core import chaos\nwork = chaos.flaky('work')(int)\nfor _ in range(500): work()\n"
    seed = wild("work").seed
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, VARIABLE: seed},
        capture_output=True,
        text=True,
        check=True,
    )
    first, last = done.stderr.splitlines()
    assert first == f"SAGELLM_CHAOS={seed}: faults are injected on purpose; this is for tests"
    assert last.startswith(f"SAGELLM_CHAOS={seed} injected work delay x ")


def test_it_loads_neither_sockets_nor_asyncio_until_it_is_on():
    source = (
        "import sys, sagellm.core.chaos\n"
        "unwanted = ('asyncio', 'selectors', 'sagellm.core.chaos_sockets')\n"
        "print([each for each in unwanted if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
