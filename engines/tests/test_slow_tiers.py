"""A dripping tier server delays neither a step nor the start of an engine."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress

import pytest

from sagellm.engines import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_random = random.Random(8)
PROMPTS = [[_random.randrange(5, 200) for _ in range(60)] for _ in range(4)]
TIMEOUT_S = 1.0
LONGEST_STEP_S = 0.8
"""Of a machine that is busy with other tests; a byte takes 0.1 s, a reply minutes."""


class DrippingProxy:
    """Stands before a real server; `drip_s` is the time between two bytes of what it answers."""

    def __init__(self, path: str) -> None:
        self.drip_s = 0.0
        self._path = path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._path)
                self._start(self._copy, client, server, False)
                self._start(self._copy, server, client, True)

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                size = 1 if is_answer and self.drip_s else len(data)
                for start in range(0, len(data), size):
                    target.sendall(data[start : start + size])
                    if size == 1:
                        time.sleep(self.drip_s)

    @staticmethod
    def _start(target, *args) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()


@pytest.fixture
def proxy(redis_url):
    made = DrippingProxy(redis_url.removeprefix("unix://"))
    yield made
    made.close()


def make(make_engine, proxy, prefix):
    redis = {"max_bytes": "64MiB", "url": proxy.url, "prefix": prefix, "timeout_s": TIMEOUT_S}
    return make_engine(block_size=8, num_blocks=20, kv_tiers={"redis": redis}, kv_fetch="always")


def run(engine):
    """Generate for all prompts, evicting what is cached before each; return tokens and the longest step."""
    tokens, longest_s = [], 0.0
    for prompt in PROMPTS:
        engine.client.core.kv.evict(20)
        engine.add_request(prompt, GREEDY)
        while engine.has_unfinished_requests():
            started_s = time.monotonic()
            outputs = engine.step()
            longest_s = max(longest_s, time.monotonic() - started_s)
            tokens += [output.outputs[0].token_ids for output in outputs if output.finished]
    engine.client.core.kv.evict(20)
    return tokens, longest_s


def test_a_server_that_starts_to_drip_slows_requests_but_no_step(make_engine, proxy):
    engine = make(make_engine, proxy, "drips")
    expected, _ = run(engine)
    for _ in range(3):
        run(engine)
    assert engine.metrics().modules["kv_tier"].num_fetched_blocks > 0
    proxy.drip_s = 0.1
    begun_s = time.monotonic()
    for _ in range(2):
        tokens, longest_s = run(engine)
        assert tokens == expected
        assert longest_s < LONGEST_STEP_S
    assert time.monotonic() - begun_s < 8 * TIMEOUT_S
    assert engine.metrics().modules["kv_tier"].tiers.num_failed > 0
    started_s = time.monotonic()
    engine.close()
    assert time.monotonic() - started_s < 5


def test_a_server_that_drips_from_the_first_byte_delays_no_start(make_engine, proxy):
    proxy.drip_s = 0.1
    begun_s = time.monotonic()
    make_engine(block_size=8, num_blocks=20)
    took_s = time.monotonic() - begun_s
    engine = make(make_engine, proxy, "drips-at-once")
    assert time.monotonic() - begun_s - 2 * took_s < TIMEOUT_S + 1.0
    _, longest_s = run(engine)
    assert longest_s < LONGEST_STEP_S
    engine.close()
