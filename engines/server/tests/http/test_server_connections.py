"""Connections: how messages are framed, which are closed at a limit, half-closed clients."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from sagellm.core import Tenant, VirtualClock
from sagellm.lab.simulation.served.loop import VirtualLoop
from sagellm.server.http.body import BodyGate
from sagellm.server.http.http_protocol import BoundedHTTP
from sagellm.server.http.request_parser import MAX_CHUNKS, MAX_HEADERS
from sagellm.testing.patience import PATIENCE_S, wait_until

GET = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": [1]}'
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def exchange(server, data, *, closes_half=False):
    """Send bytes and return the answer until the server closes."""
    with connect(server) as connection:
        connection.sendall(data)
        if closes_half:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def is_closed(connection, timeout_s=PATIENCE_S):
    """Say whether the server closes a connection without an answer."""
    if not select.select([connection], [], [], timeout_s)[0]:
        return False
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def server(scripted):
    server = scripted("a", "length")
    server.server.config.timeout_keep_alive = 0.1
    return server


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET + b"X: y\r\n" * (MAX_HEADERS - 1) + b"\r\n", 200),
        (GET + b"X: y\r\n" * MAX_HEADERS + b"\r\n", 431),
        (GET + b"X: %b\r\n\r\n" % (b"y" * 16_000), 200),
        (GET + b"X: %b\r\n\r\n" % (b"y" * 16_384), 431),
        (GET + b"X:%b\r\n\r\n" % (b" " * 16_384), 431),
        (CHUNKED + b"f\r\n%b\r\n0\r\n\r\n" % BODY, 200),
        (CHUNKED + b"F;a=b\r\n%b\r\n0\r\n\r\n" % BODY, 400),
        (CHUNKED + b"f\r\n%b\r\n0;a=b\r\n\r\n" % BODY, 400),
        (CHUNKED + b"f \r\n%b\r\n0\r\n\r\n" % BODY, 400),
        (CHUNKED + b"00000000f\r\n%b\r\n0\r\n\r\n" % BODY, 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\nf\r\n%b\r\n0\r\n\r\n" % BODY, 400),
        (POST + b"Transfer-Encoding: identity\r\n\r\n" + BODY, 400),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: xchunked\r\nContent-Length: 15\r\n\r\n" + BODY, 400),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n" + BODY, 400),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400),
        (b"\r\n\r\n" + GET + b"\r\n", 200),
        (WHOLE + GET + b"\r\n", 200),
    ],
)
def test_a_message_has_one_meaning(server, data, status):
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert (b'"error"' in answer) is (status != 200)
    assert answer.count(b"HTTP/1.1 ") == (2 if data.startswith(WHOLE) else 1)


@pytest.mark.parametrize("closes_half", [False, True])
def test_requests_that_come_at_once_are_answered_in_order(server, closes_half):
    paths = [b"/version", b"/nowhere", b"/health"] * 20
    data = b"".join(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path for path in paths)
    answer = exchange(server, data, closes_half=closes_half)
    assert [each[:3] for each in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"] * 20
    answer = exchange(server, WHOLE + GET + b"\r\n" + b"no request\r\n", closes_half=closes_half)
    assert [each[:3] for each in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]


def test_a_body_in_many_chunks_is_whole_even_if_its_client_has_closed_its_half(server):
    body = BODY + b" " * 2000
    data = CHUNKED + b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    assert exchange(server, data, closes_half=True).startswith(b"HTTP/1.1 200 ")


def test_of_a_client_that_sends_faster_than_it_is_read_little_is_kept(server, monkeypatch):
    kept, take_turn = [], BoundedHTTP._take_turn

    def take(connection):
        kept.append(len(connection._unread))
        take_turn(connection)

    monkeypatch.setattr(BoundedHTTP, "_take_turn", take)
    answer = exchange(server, CHUNKED + b"1\r\nx\r\n" * (MAX_CHUNKS + 1))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert len(kept) > MAX_CHUNKS / 200
    assert max(kept) < 512 << 10  # what is read at once, and what is kept before
    assert sorted(kept)[len(kept) // 2] <= 320 << 10


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
JAVA = (
    H2C + b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUser-Agent: Java-http-client/17\r\n"
)
CURL = b"User-Agent: curl/7.88.1\r\nAccept: */*\r\n" + H2C + b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize(
    "offers",
    [
        JAVA,
        CURL,
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        b"Upgrade: h2c\r\n",
        b"TE: trailers\r\nConnection: keep-alive, TE\r\n",
        b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    ],
    ids=["java", "curl", "websocket", "no connection option", "te", "settings alone"],
)
def test_an_offer_is_ignored_and_the_connection_goes_on(server, offers):
    with_offer = WHOLE.replace(b"\r\n", b"\r\n" + offers, 1)
    answer = exchange(server, with_offer + GET.replace(b"\r\n", b"\r\n" + offers, 1) + b"\r\n" + WHOLE)
    assert answer.count(b"HTTP/1.1 200 ") == 3, answer
    assert answer.count(b'"finish_reason":') == 2
    chunked = CHUNKED.replace(b"\r\n", b"\r\n" + offers, 1) + b"f\r\n%b\r\n0\r\n\r\n" % BODY
    assert b'"finish_reason":' in exchange(server, chunked)


def test_a_client_that_asks_to_send_its_body_is_told_to_go_on(server):
    asks = WHOLE.replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1)
    with connect(server) as connection:
        connection.sendall(asks[: -len(BODY)])
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert exchange(server, asks.replace(b"HTTP/1.1", b"HTTP/1.0")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_that_offers_http_2_is_answered(server):
    command = ["curl", "-sS", "--max-time", "20", "--http2", "-H", "Content-Type: application/json"]
    command += ["-d", BODY.decode(), "-w", " %{http_version} %{http_code}", f"{server.url}/v1/completions"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert answer.stdout.endswith(" 1.1 200"), answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET.replace(b"HTTP/1.1", b"HTTP/2.0") + b"\r\n", b"505"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (GET.replace(b" /", b"  /") + b"\r\n", b"400"),
        (GET.replace(b" HTTP", b"\tHTTP") + b"\r\n", b"400"),
        (b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n", b"501"),
        (b"GET /version HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /version HTTP/1.0\r\n\r\n", b"403"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"404"),
        (b"GET http://127.0.0.1/version HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"200"),
        (b"GET http://evil.example/version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"403"),
        (b"GET http://127.0.0.1@evil.example/version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"400"),
        (b"GET http://evil.example/version HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n", b"403"),
        (GET + b"Host: 127.0.0.1\r\n\r\n", b"400"),
    ],
)
def test_the_request_line_decides_version_and_host(server, data, status):
    answer = exchange(server, data)
    assert answer.split()[1] == status
    assert (b'"error"' in answer) is (status != b"200")


def test_a_body_that_stalls_is_refused(scripted):
    server = scripted("a", body_timeout=600, body_stall_timeout=0.3)
    answer = exchange(server, POST + b'Content-Length: 100\r\n\r\n{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"no more of the body arrived within 0.3 s" in answer


@pytest.mark.parametrize(
    ("pause_s", "ended_s", "reason"),
    [
        (2.0, 30.0, "the body did not arrive within 30 s"),
        (2.5, 2.5, "no more of the body arrived within 2.5 s"),
    ],
)
def test_a_body_that_drips_does_not_stall_but_still_times_out(pause_s, ended_s, reason):
    sent = []

    async def receive():
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message):
        sent.append(message)

    async def use():
        gate = BodyGate(None, paths=("/tokenize",), timeout_s=30, stall_timeout_s=2.5)
        headers = [(b"content-type", b"application/json")]
        state = {"tenant": Tenant("a")}
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers, "state": state}
        await gate(scope, receive, send)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(VirtualClock())) as runner:
        assert runner.run(use()) == ended_s
    assert (sent[0]["status"], reason in sent[1]["body"].decode()) == (408, True)


def test_a_body_that_is_never_read_does_not_hold_its_connection(scripted, monkeypatch):
    monkeypatch.setattr("sagellm.server.http.http_protocol._HEADER_TIMEOUT_S", 0.5)
    server = scripted(api_keys=("key",))
    with connect(server) as connection:
        connection.sendall(POST + b"Content-Length: 1000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        # Each byte gives it no more time.
        wait_until(lambda: select.select([connection], [], [], 0.1)[0] or connection.sendall(b" "))
        assert is_closed(connection)


def test_a_client_that_closes_its_sending_half_gets_its_answer(scripted):
    server = scripted("a", "length")
    answer = exchange(server, WHOLE, closes_half=True)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":' in answer
    streamed = b'{"prompt": [1], "stream": true}'
    data = POST + b"Content-Length: %d\r\n\r\n%b" % (len(streamed), streamed)
    assert exchange(server, data, closes_half=True).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert exchange(server, WHOLE + WHOLE, closes_half=True).count(b"HTTP/1.1 200 ") == 2
    assert exchange(server, WHOLE[:-1], closes_half=True) == b""


def test_a_half_closed_client_is_probed_and_one_that_is_gone_is_dropped(scripted, until):
    server = scripted(None)
    with connect(server) as waiting:
        gone = connect(server)
        for connection in (waiting, gone):
            connection.sendall(WHOLE)
        until(lambda: server.app.state.admission.num_live == 2)
        waiting.shutdown(socket.SHUT_WR)
        gone.close()
        until(lambda: server.app.state.admission.num_live == 1)
        assert waiting.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert server.app.state.admission.num_live == 1


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_longest_idle_connection_makes_room(connections, scripted, until):
    server = scripted("a", "length", max_connections=3)
    idle = [connections.enter_context(connect(server)) for _ in range(3)]
    until(lambda: len(server.server.server_state.connections) == 3)
    idle[0].sendall(GET + b"\r\n")  # now it has been idle for the shortest time
    assert idle[0].recv(65536).startswith(b"HTTP/1.1 200 ")
    assert server.http.get("/version").status_code == 200
    assert is_closed(idle[1])
    assert not is_closed(idle[2], 0.1)
    assert not is_closed(idle[0], 0.1)


def test_beyond_the_limit_only_probes_are_answered(scripted, connections, until):
    server = scripted(None, max_connections=2)
    for _ in range(2):
        connections.enter_context(connect(server)).sendall(WHOLE)
    until(lambda: server.app.state.admission.num_live == 2)
    for path in ("/health", "/ready", "/version"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    answer = server.http.post("/v1/completions", json={"prompt": [1]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "too_many_connections"
    assert "x-request-id" in answer.headers
    assert server.http.get("/v1/models").status_code == 503


def test_one_address_has_a_limit_of_its_own(scripted, connections, until):
    server = scripted(None, max_connections=10, max_connections_per_peer=2)
    for _ in range(2):
        connections.enter_context(connect(server)).sendall(WHOLE)
    until(lambda: server.app.state.admission.num_live == 2)
    answer = server.http.get("/v1/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "from this address" in answer.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    other = socket.socket()
    connections.enter_context(other).bind(("127.0.0.2", 0))
    other.connect(("127.0.0.1", server.port))
    other.sendall(GET + b"\r\n")
    assert other.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_probe_only_connections_are_bounded_and_the_newest_is_answered(scripted, connections, until):
    server = scripted(None, max_connections=1)
    connections.enter_context(connect(server)).sendall(WHOLE)
    until(lambda: server.app.state.admission.num_live == 1)
    for _ in range(100):
        connections.enter_context(connect(server))
    assert server.http.get("/health").status_code == 200
    assert len(server.server.server_state.connections) <= 1 + 16 + 1
    assert server.app.state.admission.num_live == 1


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.path.insert(0, sys.argv[1])
from conftest import ScriptedFront
from sagellm.engines.config import ServerConfig
from sagellm.server.http import http_protocol
from sagellm.server.http import create_app, make_server
import asyncio
http_protocol._HEADER_TIMEOUT_S = 3600.0  # no connection is closed for being idle
async def main():
    settings = ServerConfig(port=0)
    server = make_server(create_app(ScriptedFront(), settings), settings)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving
loop = None
if sys.argv[2] == "uvloop":
    import uvloop
    loop = uvloop.new_event_loop
with asyncio.Runner(loop_factory=loop) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["uvloop", pytest.param("asyncio", marks=pytest.mark.full)])
def test_health_answers_beside_300_idle_connections_with_64_files(connections, tmp_path, loop):
    script = tmp_path / "few_files.py"
    script.write_text(FEW_FILES)
    command = [sys.executable, str(script), str(__file__).rpartition("/")[0], loop]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(300):
            connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
                connection.sendall(GET.replace(b"/version", b"/health") + b"\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    finally:
        process.kill()
        process.wait()


def test_an_answer_of_no_known_length_has_no_chunks_in_http_1_0(server):
    """HTTP/1.0 does not know them: their sizes would stand between the events."""
    body = b'{"prompt": [1], "stream": true}'
    head = POST.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer, _, events = exchange(server, head + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer.lower()
    assert b"connection: close" in answer.lower()
    assert all(line[:6] in (b"", b"data: ") for line in events.split(b"\n"))
    assert events.endswith(b"data: [DONE]\n\n")
