"""How much the server takes on, and how it ends."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from contextlib import suppress
from dataclasses import replace

import httpx
import openai
import pytest

from sagellm.core import DeadlyRequestError, EngineDeadError, EngineError, Runtime, VirtualClock
from sagellm.engines import AsyncLLMEngine, SamplingParams
from sagellm.engines.engine_client import RESPONSIVE_S
from sagellm.server.http.admission import Admission
from sagellm.server.http.errors import APIError
from sagellm.server.http.request_parser import MAX_HEADER_BYTES
from sagellm.testing.patience import PATIENCE_S, wait_until_async

BODY = {"prompt": [1, 2], "max_tokens": 5}
SLOW = {"prompt": "The river", "max_tokens": 300, "ignore_eos": True}
RAW = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b'Content-Length: 15\r\n\r\n{"prompt": [1]}'
)


class Pending:
    """Requests that are sent from threads of their own."""

    def __init__(self, server, bodies):
        self.answers = []
        self._url = server.url
        self._threads = [threading.Thread(target=self._post, args=(body,)) for body in bodies]
        for thread in self._threads:
            thread.start()

    def _post(self, body):
        self.answers.append(
            httpx.post(f"{self._url}/v1/completions", json=body, timeout=PATIENCE_S, verify=False)
        )

    def join(self):
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self.answers


@pytest.fixture
def busy(scripted, until):
    """A server whose engine never answers, full."""
    connections = []

    def start(num, **settings):
        server = scripted(None, **settings)
        for _ in range(num):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(RAW)
            connections.append(connection)
        until(lambda: server.app.state.admission.num_live == num)
        return server, connections

    yield start
    for connection in connections:
        connection.close()


def test_beyond_the_queue_requests_are_refused_and_then_taken_again(busy, until):
    server, connections = busy(5, max_num_seqs=2, max_queued_requests=3)
    answer = server.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"] == {
        "message": "5 sequences are waiting or running; try again later",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    with pytest.raises(openai.RateLimitError):
        server.openai().completions.create(model="small", prompt=[1])
    assert server.http.get("/health").status_code == 200
    connections[0].close()
    until(lambda: server.app.state.admission.num_live == 4)
    server.front.script = ("a", "length")
    assert server.http.post("/v1/completions", json=BODY).status_code == 200
    assert server.http.post("/v1/completions", json={**BODY, "prompt": [[1], [2]]}).status_code == 429


def test_a_request_larger_than_the_queue_is_taken_when_it_is_alone(scripted):
    server = scripted("a", "length", max_num_seqs=1, max_queued_requests=0)
    assert server.http.post("/v1/completions", json={**BODY, "prompt": [[1], [2], [3]]}).status_code == 200
    assert server.app.state.admission.num_live == 0


def test_an_overload_is_answered_to_the_last_request(serve, hold, until):
    server = serve(max_num_seqs=2, max_queued_requests=2, engine={"max_num_seqs": 2})
    go_on = hold(server.front.engine)
    pending = Pending(server, [{**SLOW, "max_tokens": 40}] * 30)
    until(lambda: len(pending.answers) == 26)
    go_on.set()
    answers = pending.join()
    assert [answer.status_code for answer in answers] == [429] * 26 + [200] * 4
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
    assert server.app.state.admission.num_live == 0


def test_a_draining_server_takes_nothing_new(scripted):
    server = scripted("a", "length")
    admission = server.app.state.admission
    admission.start_draining()
    answer = server.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "shutting_down"
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/health").status_code == 200


def test_a_server_that_stops_lets_streams_end(serve, hold, until):
    server = serve()
    go_on = hold(server.front.engine, 5)
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={**SLOW, "stream": True},
        timeout=PATIENCE_S,
        verify=False,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.server.handle_exit(15, None)
        until(lambda: server.app.state.admission.is_draining)
        go_on.set()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    until(lambda: not server.thread.is_alive())


def test_a_second_signal_stops_at_once(busy, until):
    server, _ = busy(2, shutdown_timeout=3600)
    server.server.handle_exit(15, None)
    until(lambda: server.app.state.admission.is_draining)
    assert server.thread.is_alive()
    server.server.handle_exit(15, None)
    until(lambda: not server.thread.is_alive())


def test_the_shutdown_timeout_ends_what_does_not(busy, until):
    server, _ = busy(2, shutdown_timeout=1)
    server.server.handle_exit(15, None)
    until(lambda: not server.thread.is_alive())
    assert server.app.state.admission.num_live == 0


def test_wait_idle(busy, until):
    server, connections = busy(1)

    async def wait(seconds):
        await asyncio.wait_for(server.app.state.admission.wait_idle(), seconds)

    with pytest.raises(TimeoutError):
        asyncio.run(wait(0.05))
    connections[0].close()
    until(lambda: server.app.state.admission.num_live == 0)
    asyncio.run(wait(PATIENCE_S))


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def exchange(server, data, *, then=b""):
    """Send bytes and return the answer until the server closes."""
    with connect(server) as connection:
        connection.sendall(data)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
                if then:
                    connection.sendall(then)
        except (ConnectionResetError, BrokenPipeError):
            pass
        return answer


def test_a_body_that_does_not_come_is_not_waited_for(scripted):
    server = scripted("a", body_timeout=0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    answer = exchange(server, head + b'Content-Length: 100\r\n\r\n{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * (2 * MAX_HEADER_BYTES),
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-Many: a\r\n" * (MAX_HEADER_BYTES // 5),
        b"GET /" + b"a" * (2 * MAX_HEADER_BYTES),
    ],
    ids=["one header", "many headers", "a path"],
)
def test_headers_have_an_end(scripted, monkeypatch, data):
    monkeypatch.setattr("sagellm.server.http.http_protocol._HEADER_TIMEOUT_S", 3600.0)  # nor is time up
    answer = exchange(scripted(), data)
    assert answer.startswith(b"HTTP/1.1 431 ") or not answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"\x80\x04\x95\x10cos\nsystem\n(S'true'\ntR.",
    ],
    ids=["nothing", "no path", "below zero", "two lengths", "no chunk", "a pickle"],
)
def test_malformed_http_is_refused(scripted, data):
    server = scripted()
    answer = exchange(server, data)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 "))
    assert b"Traceback" not in answer
    assert server.http.get("/health").status_code == 200


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("first", "then"), [(b"", b"X-A: b\r\n" * 1000), (b"X-A: ", b"b" * 8000)], ids=["many", "long"]
)
def test_trailers_have_an_end(scripted, first, then):
    server = scripted("a", "length")
    sent = 0
    with (
        connect(server) as connection,
        suppress(ConnectionResetError, BrokenPipeError),
    ):
        connection.sendall(CHUNKED + b"2\r\n{}\r\n0\r\n" + first)
        while sent < 50_000_000:
            connection.sendall(then)
            sent += len(then)
    assert sent < 10_000_000


def test_trailers_are_not_headers(scripted):
    server = scripted("a", "length", api_keys=("key",))
    server.server.config.timeout_keep_alive = 0.3
    body = b'{"prompt": [1]}'
    data = CHUNKED + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer key\r\n\r\n" % (len(body), body)
    assert exchange(server, data).startswith(b"HTTP/1.1 401 ")


def test_a_stray_byte_keeps_no_connection_open(scripted, monkeypatch):
    monkeypatch.setattr("sagellm.server.http.http_protocol._HEADER_TIMEOUT_S", 0.3)
    server = scripted()
    server.server.config.timeout_keep_alive = 3600
    data = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    assert exchange(server, data, then=b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_the_beginning_of_a_next_request_does_not_cut_a_stream(scripted, monkeypatch):
    monkeypatch.setattr("sagellm.server.http.http_protocol._HEADER_TIMEOUT_S", 0.5)
    server = scripted("a", None, shutdown_timeout=0.5)
    body = b'{"prompt": [1], "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /ver")
        answer = connection.recv(65536)
        with connect(server) as idle:
            assert idle.recv(1) == b"", "it opened later, and its time for a head is over"
        assert not select.select([connection], [], [], 0)[0]
        server.server.drain()
        while b"shutting_down" not in answer:
            answer += (part := connection.recv(65536))
            assert part, answer


def test_all_bodies_together_are_bounded(scripted, monkeypatch):
    monkeypatch.setattr("sagellm.server.http.body.MAX_HELD_BYTES", 1000)
    server = scripted("a", "length")
    answer = server.http.post("/v1/completions", json={**BODY, "user": "a" * 1000})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    for _ in range(100):  # nothing is held after an answer
        assert server.http.post("/v1/completions", json=BODY).status_code == 200


def test_a_client_that_does_not_read_counts_as_gone(scripted, until, monkeypatch):
    monkeypatch.setattr("sagellm.server.http.http_protocol._STALL_TIMEOUT_S", 0.3)
    server = scripted(*["a" * 100_000] * 500, "length")
    body = b'{"prompt": [1], "stream": true}'
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(lambda: server.front.requests)
        until(lambda: server.app.state.admission.num_live == 0)


def test_health_says_whether_the_engine_makes_progress(scripted):
    server = scripted()
    assert server.http.get("/health").status_code == 200
    server.front.is_responsive, server.front.status = False, "unresponsive"
    answer = server.http.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "unresponsive"})


def test_health_asks_nothing_of_an_engine_that_computes_a_long_step(scripted):
    server = scripted()
    server.front.metrics_error = EngineError("busy")
    assert [server.http.get("/health").status_code for _ in range(3)] == [200] * 3


def test_an_engine_in_a_long_step_is_healthy_and_one_that_hangs_is_not(make_engine, monkeypatch):
    """In this process: the thread that steps may take any time between two layers' beats, but not longer."""
    clock = VirtualClock()
    engine = make_engine(runtime=replace(Runtime.system(seed=0), clock=clock))
    attention = engine.client.core.runner.backend._attention
    real, hangs, front, seen = attention._attention.forward, False, None, []
    waiting, may_go_on = threading.Event(), threading.Event()

    def pass_time(share):
        clock.advance_ns(int(share * RESPONSIVE_S * 1e9))

    def slow(*arguments):
        pass_time(0.75)  # two layers take longer than an engine may be silent
        seen.append(front.is_responsive)
        if hangs:
            waiting.set()
            assert may_go_on.wait(PATIENCE_S)
        return real(*arguments)

    monkeypatch.setattr(attention._attention, "forward", slow)

    async def use():
        nonlocal front, hangs
        front = AsyncLLMEngine(engine)
        assert front.is_responsive
        await read(front)
        assert len(seen) >= 6
        assert all(seen)
        hangs = True
        reading = asyncio.create_task(read(front))
        await wait_until_async(waiting.is_set)
        assert front.is_responsive
        pass_time(0.5)
        assert not front.is_responsive
        hangs = False
        may_go_on.set()
        await reading
        pass_time(10)
        assert front.is_responsive, "one that has nothing to do is responsive"
        await front.close()

    async def read(front):
        async for _ in front.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)):
            pass

    asyncio.run(use())


def test_what_outlasts_the_drain_ends_with_an_error(scripted, until):
    server = scripted("a", None, shutdown_timeout=0.5)
    streamed = Pending(server, [{"prompt": [1], "stream": True}])
    whole = Pending(server, [{"prompt": [2]}])
    until(lambda: server.app.state.admission.num_live == 2)
    server.server.drain()
    (events,), (answer,) = streamed.join(), whole.join()
    assert '"code":"shutting_down"' in events.text.replace(" ", "")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in answer.headers
    until(lambda: not server.thread.is_alive())


def test_a_drain_does_not_wait_for_an_engine_that_makes_no_progress(scripted, until):
    """A frozen core once kept a server from ending for 30 s, though it could answer nobody."""
    server = scripted("a", None, shutdown_timeout=3600.0)
    streamed = Pending(server, [{"prompt": [1], "stream": True}])
    until(lambda: server.app.state.admission.num_live == 1)
    server.server.drain()
    server.front.is_responsive = False
    (events,) = streamed.join()
    assert '"code":"shutting_down"' in events.text.replace(" ", "")
    until(lambda: not server.thread.is_alive())


def test_a_drain_does_not_wait_for_requests_that_wait_for_the_engine_to_start(scripted, until):
    server = scripted(shutdown_timeout=3600.0)
    waiting = threading.Event()

    async def wait(*_, **__):
        waiting.set()
        await asyncio.Event().wait()

    server.front.add_job, server.front.is_responsive = wait, False
    whole = Pending(server, [BODY])
    assert waiting.wait(30)
    server.server.drain()
    (answer,) = whole.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    until(lambda: not server.thread.is_alive())


def test_a_client_that_leaves_while_the_engine_starts_frees_its_seat(scripted, until):
    server = scripted()
    waiting = threading.Event()

    async def wait(*_, **__):
        waiting.set()
        await asyncio.Event().wait()

    server.front.add_job = wait
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(RAW)
        assert waiting.wait(30)
    until(lambda: server.app.state.admission.num_live == 0)


def test_a_request_that_begins_to_run_when_all_were_ended_ends_too():
    admission = Admission(4)
    with admission.seat() as seat:
        admission.stop_all()
        with pytest.raises(APIError, match="shutting down"):
            seat.run(print)


def test_ready_is_what_the_engine_says(scripted):
    server = scripted()
    answer = server.http.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    server.front.is_ready = False
    assert server.http.get("/ready").status_code == 503


def test_probes_say_what_the_engine_does_and_when_it_is_started_again(scripted):
    server = scripted()
    server.front.is_ready = server.front.is_responsive = False
    server.front.status, server.front.pause_s = "waiting to restart", 7.2
    for path in ("/health", "/ready"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.json()) == (503, {"status": "waiting to restart"})
        assert answer.headers["retry-after"] == "8"


@pytest.mark.parametrize(("retry_after_s", "told"), [(None, "1"), (0.0, "1"), (16.4, "17")])
def test_requests_are_told_when_the_engine_is_started_again(scripted, retry_after_s, told):
    server = scripted("refuse", EngineDeadError("it is gone", retry_after_s=retry_after_s))
    answer = server.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert answer.headers["retry-after"] == told


def test_a_request_that_ended_the_engine_twice_is_not_to_be_sent_again(scripted):
    server = scripted("refuse", DeadlyRequestError("the engine ended 2 times while it had this request"))
    answer = server.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_died_twice")
    assert answer.json()["error"]["message"].endswith("; do not send it again")
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def test_a_long_prompt_does_not_stop_the_others(scripted):
    """The loop goes on while a long text is tokenized."""
    is_tokenizing, may_go_on = threading.Event(), threading.Event()

    def tokenize(text, **_):
        is_tokenizing.set()
        assert may_go_on.wait(PATIENCE_S)
        return {"input_ids": [1]}

    server = scripted("word", "length", tokenizer=tokenize)
    slow = Pending(server, [{"prompt": "a" * 5000, "max_tokens": 1}])
    assert is_tokenizing.wait(PATIENCE_S)
    assert httpx.get(f"{server.url}/version", timeout=PATIENCE_S, verify=False).status_code == 200
    may_go_on.set()
    assert [answer.status_code for answer in slow.join()] == [200]
