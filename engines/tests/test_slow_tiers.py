"""A tier's server that says nothing delays neither a step nor the start of an engine."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from sagellm.core import Runtime, VirtualClock
from sagellm.engines import SamplingParams
from sagellm.testing.patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_random = random.Random(8)
PROMPTS = [[_random.randrange(5, 200) for _ in range(60)] for _ in range(4)]
TIMEOUT_S = PATIENCE_S
"""Of the engine's clock, which a test moves."""


class Proxy:
    """Stands before a real server, whose answers it keeps while `is_open` is not set."""

    def __init__(self, path: str) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self._path = path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self) -> None:
        self.is_open.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._path)
                self._start(self._copy, client, server)
                self._start(self._copy, server, client)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                self.is_open.wait()
                target.sendall(data)

    @staticmethod
    def _start(target, *args) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()


@pytest.fixture
def proxy(redis_url):
    made = Proxy(redis_url.removeprefix("unix://"))
    yield made
    made.close()


@pytest.fixture
def clock():
    return VirtualClock()


def make(make_engine, proxy, prefix, clock):
    redis = {"max_bytes": "64MiB", "url": proxy.url, "prefix": prefix, "timeout_s": TIMEOUT_S}
    runtime = replace(Runtime.system(seed=0), clock=clock)
    tiers = {"redis": redis}
    return make_engine(block_size=8, num_blocks=20, kv_tiers=tiers, kv_fetch="always", runtime=runtime)


def run(engine):
    """Generate for all prompts, evicting what is cached before each; return the tokens."""
    tokens = []
    for prompt in PROMPTS:
        engine.client.core.kv.evict(20)
        engine.add_request(prompt, GREEDY)
        tokens += finish(engine)
    engine.client.core.kv.evict(20)
    return tokens


def finish(engine):
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [output.outputs[0].token_ids for output in engine.step() if output.finished]
    return tokens


def test_a_server_that_falls_silent_delays_its_requests_but_no_step(make_engine, proxy, clock):
    engine = make(make_engine, proxy, "silent", clock)
    expected = run(engine)
    while not engine.metrics().modules["kv_tier"].num_fetched_blocks:
        assert run(engine) == expected
    proxy.is_open.clear()
    engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(100):
        assert not engine.step()
    while not engine.metrics().modules["kv_tier"].tiers.num_failed:  # its thread may still have to ask
        clock.advance_ns(round(2 * TIMEOUT_S * 1e9))
        engine.step()
    assert finish(engine) == expected[:1]
    assert run(engine) == expected, "it is not waited for again"
    engine.close()


def test_a_server_that_is_silent_from_the_first_byte_delays_no_start(make_engine, proxy, clock):
    proxy.is_open.clear()
    engine = make(make_engine, proxy, "silent-at-once", clock)
    assert [len(tokens) for tokens in run(engine)] == [6] * 4
    engine.close()
