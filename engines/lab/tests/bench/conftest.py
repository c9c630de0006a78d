"""A server that speaks just enough of OpenAI's API, with delays and faults that a test chooses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest

from sagellm.core import VirtualClock
from sagellm.lab.simulation.served.loop import VirtualLoop
from sagellm.lab.simulation.served.network import Network
from sagellm.lab.simulation.served.weather import Weather
from sagellm.testing.patience import PATIENCE_S

KEY = "open sesame"


@pytest.fixture(autouse=True)
def _read_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the read bandwidth in a moment: no test looks at the figure."""
    monkeypatch.setattr("sagellm.engines.metrics.limits.READ_BYTES", 1 << 20)


class StatedRates:
    """The native library's loops on a machine with these rates."""

    variant = "amx"

    def matrix_rate(self, kind: str, num_threads: int) -> float:
        return {"bfloat16": 2e12, "int8": 4e12, "float32": 5e11}[kind]

    def read_bandwidth(self, num_bytes: int, num_threads: int) -> float:
        return 1e10


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose rates are stated and not measured; torch multiplies float32 and FP8 best."""
    rates = {"float32": 1e11, "bfloat16": 5e10, "float8_e4m3fn": 3e11}
    monkeypatch.setattr("sagellm.engines.metrics.limits.native_limits", StatedRates)
    monkeypatch.setattr(
        "sagellm.engines.metrics.limits._gemm_rate",
        lambda device, dtype, *size: rates[dtype],
    )


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How one request is answered."""

    first_s: float = 0.0
    gap_s: float = 0.0
    num_tokens: int | None = None  # what was asked for
    tokens_per_event: int = 1
    status: int = 200
    error: str | None = None  # sent as an event after the first
    cut_after: int | None = None  # events after which the connection ends
    is_polite_cut: bool = False  # the cut ends the HTTP answer, not the connection
    has_done: bool = True
    has_usage: bool = True
    num_cached: int | None = None
    drafts: tuple[int, int] | None = None  # tokens that were accepted, and rejected
    finish_reason: str = "length"
    piece_bytes: int | None = None  # send the answer in pieces of this size
    content_type: str = "text/event-stream; charset=utf-8"
    raw: bytes | None = None  # send this instead of HTTP


@dataclass
class FakeServer:
    """Answers completions and chat; `behave` maps the number of the request to its behaviour."""

    behave: Callable[[int], Behaviour] = lambda number: Behaviour()
    models: list[str] = field(default_factory=lambda: ["tiny"])
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_running: int = 0
    max_running: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head.split(" ")[1]
        if self.key is not None and headers.get("authorization") != f"bearer {self.key}":
            return send(writer, 401, {"error": {"message": "wrong key"}})
        if path.endswith("/models"):
            return send(writer, 200, {"data": [{"id": one, "owned_by": "fake"} for one in self.models]})
        self.paths.append(path)
        self.bodies.append(json.loads(body))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            return await self._stream(writer, self.behave(len(self.bodies) - 1), self.bodies[-1])
        finally:
            self.num_running -= 1

    async def _stream(self, writer: asyncio.StreamWriter, how: Behaviour, body: dict[str, Any]) -> bool:
        if how.raw is not None:
            writer.write(how.raw)
            return False
        if how.status != 200:
            return send(writer, how.status, {"error": {"message": f"status {how.status} it is"}})
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {how.content_type}\r\n".encode())
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        is_whole = await self._tokens(writer, how, body)
        if is_whole:
            await self._end(writer, how, body)
        return is_whole or how.is_polite_cut

    async def _tokens(self, writer: asyncio.StreamWriter, how: Behaviour, body: dict[str, Any]) -> bool:
        """Say whether the answer came to its end."""
        total = body["max_tokens"] if how.num_tokens is None else how.num_tokens
        is_chat = "messages" in body
        if is_chat:
            await chunk(writer, event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), how)
        await asyncio.sleep(how.first_s)
        for number in range(0, total, how.tokens_per_event):
            if number and how.gap_s:
                await asyncio.sleep(how.gap_s)
            if number == how.cut_after:
                writer.write(b"0\r\n\r\n" if how.is_polite_cut else b"")
                return False
            if number and how.error is not None:
                await chunk(writer, event({"error": {"message": how.error}}), how)
            choice = {"delta": {"content": " so"}} if is_chat else {"text": " so"}
            await chunk(writer, event({"choices": [choice | {"finish_reason": None}]}), how)
        return True

    async def _end(self, writer: asyncio.StreamWriter, how: Behaviour, body: dict[str, Any]) -> None:
        await chunk(writer, event({"choices": [{"text": "", "finish_reason": how.finish_reason}]}), how)
        if how.has_usage:
            total = body["max_tokens"] if how.num_tokens is None else how.num_tokens
            usage = {"prompt_tokens": len(body.get("prompt", "12345")), "completion_tokens": total}
            if how.num_cached is not None:
                usage |= {"prompt_tokens_details": {"cached_tokens": how.num_cached}}
            if how.drafts is not None:
                accepted, rejected = how.drafts
                usage |= {
                    "completion_tokens_details": {
                        "accepted_prediction_tokens": accepted,
                        "rejected_prediction_tokens": rejected,
                    }
                }
            await chunk(writer, event({"choices": [], "usage": usage}), how)
        if how.has_done:
            await chunk(writer, b": a comment\n\ndata: [DONE]\n\n", how)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def chunk(writer: asyncio.StreamWriter, data: bytes, how: Behaviour) -> None:
    framed = f"{len(data):x}\r\n".encode() + data + b"\r\n"
    size = how.piece_bytes or len(framed)
    for start in range(0, len(framed), size):
        writer.write(framed[start : start + size])
        await writer.drain()
        if how.piece_bytes:
            await asyncio.sleep(0)


def send(writer: asyncio.StreamWriter, status: int, data: Any) -> bool:
    body = json.dumps(data).encode()
    writer.write(
        f"HTTP/1.1 {status} X\r\nServer: fake/1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return True


@pytest.fixture
def fake_server():
    """Start servers in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    started = []

    def start(behaviour: Behaviour | Callable[[int], Behaviour] = Behaviour(), **settings: Any) -> FakeServer:
        behave = behaviour if callable(behaviour) else lambda number: behaviour
        server = FakeServer(behave=behave, **settings)
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(server.serve, "127.0.0.1", 0), loop
        ).result(PATIENCE_S)
        started.append(listening)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        return server

    yield start

    async def stop() -> None:
        for listening in started:
            listening.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(stop(), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Still(Weather):
    """No fault, and no delay."""

    def latency_s(self, random: Random) -> float:
        return 0.0


class BenchLoop(VirtualLoop):
    """Connects clients and fake servers in one thread; only what a server is told to takes time."""

    def __init__(self, servers: list[FakeServer]) -> None:
        super().__init__(VirtualClock())
        self.network = Network(self, Still(self.clock, ""), "", lambda line: None)
        for port, server in enumerate(servers, 1):
            listener = self.network.listen(f"127.0.0.1:{port}")
            listener.on_change = partial(self._accept, listener, server)

    def _accept(self, listener: Any, server: FakeServer) -> None:
        reader = asyncio.StreamReader(loop=self)
        self.open_end(
            listener.accept()[0], lambda: asyncio.StreamReaderProtocol(reader, server.serve, loop=self)
        )

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        return self.open_end(self.network.connect(f"{host}:{port}"), protocol_factory)


@pytest.fixture
def timed_server(monkeypatch):
    """Start servers that clients reach in virtual time, so that delays are exactly what is told."""
    started: list[FakeServer] = []

    def start(behaviour: Behaviour | Callable[[int], Behaviour], **settings: Any) -> FakeServer:
        behave = behaviour if callable(behaviour) else lambda number: behaviour
        started.append(FakeServer(behave=behave, **settings))
        started[-1].url = f"http://127.0.0.1:{len(started)}/v1"
        return started[-1]

    def run(main: Any) -> Any:
        with asyncio.Runner(loop_factory=lambda: BenchLoop(started)) as runner:
            return runner.run(main)

    monkeypatch.setattr(asyncio, "run", run)
    return start


@pytest.fixture
def behaviour() -> type[Behaviour]:
    return Behaviour
