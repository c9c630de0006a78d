"""The access log: a line per request, harmless, and without a word of what was said."""

from __future__ import annotations

import logging
import re
import socket

import pytest

from sagellm.core import EngineDeadError
from sagellm.server.http.access_log import access_line, logger
from sagellm.testing.patience import PATIENCE_S

COMPLETION = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def lines(until):
    """The lines of this test; `until` waits for one, as it comes after the answer."""
    seen = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: seen.append((record.levelname, record.getMessage()))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield seen
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_request_has_a_line_with_its_status_tokens_time_and_id(server, lines, until):
    answer = server.http.post("/v1/completions", json=COMPLETION)
    until(lambda: lines)
    [(level, line)] = lines
    assert level == "INFO"
    pattern = r"POST /v1/completions 200, 6 tokens in \(\d cached\), 4 out, \d+\.\d{3} s, (\S+)"
    found = re.fullmatch(pattern, line)
    assert found, line
    assert found[1].partition("-")[0] in answer.json()["id"]


def test_a_log_of_json_has_what_the_line_says_under_names(serve, lines, until):
    server = serve(api_keys=("sesame name=red",))
    records = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append
    logger.addHandler(handler)
    headers = {"Authorization": "Bearer sesame", "X-Request-Id": "mine"}
    try:
        answer = server.http.post("/v1/completions", json=COMPLETION, headers=headers)
        server.http.post("/v1/completions", json={**COMPLETION, "n": 0}, headers=headers)
        server.http.get("/v1/models")
        until(lambda: len(records) == 3)
    finally:
        logger.removeHandler(handler)
    done, refused, without_key = (record.fields for record in records)
    assert answer.json()["id"] == f"cmpl-{done['request_id']}"
    expected = {
        "client_request_id": "mine",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "tenant": "red",
        "client": "127.0.0.1",
        "prompt_tokens": 6,
        "output_tokens": 4,
    }
    assert expected.items() <= done.items()
    assert 0 <= done["queue_s"] <= done["first_token_s"] <= done["duration_s"]
    assert min(done["prefill_s"], done["decode_s"]) > 0
    assert {"status": 400, "error": "invalid_value", "tenant": "red"}.items() <= refused.items()
    assert {"prompt_tokens", "trace_id"} & refused.keys() == set()
    assert without_key["status"] == 401
    assert "tenant" not in without_key


def test_a_stream_and_many_prompts_are_counted_whole(server, lines, until):
    body = {**COMPLETION, "prompt": [[5, 6, 7], [8, 9]], "stream": True, "n": 2}
    server.http.post("/v1/completions", json=body).read()
    until(lambda: lines)
    assert re.match(r"POST /v1/completions 200, 5 tokens in \(\d cached\), 16 out, ", lines[0][1])


def test_a_stream_that_ends_with_an_error_has_its_code_beside_its_status(scripted, lines, until):
    server = scripted("a", EngineDeadError("gone"))
    server.http.post("/v1/completions", json={"prompt": [1], "stream": True}).read()
    server.http.post("/v1/completions", json={"prompt": [1], "n": 0}).read()
    server.http.post("/tokenize", json={"prompt": "a", "model": "another"}).read()
    until(lambda: len(lines) == 3)
    assert lines[0][1].startswith("POST /v1/completions 200, engine_dead, 1 tokens in")
    assert lines[1][1].startswith("POST /v1/completions 400, invalid_value, 0.")
    assert lines[2][1].startswith("POST /tokenize 404, model_not_found, 0.")


def test_neither_prompts_nor_keys_nor_queries_are_logged(serve, lines, until):
    server = serve(api_keys=("sesame-key",))
    headers = {"Authorization": "Bearer sesame-key"}
    chat = {"messages": [{"role": "user", "content": "my secret word"}], "max_tokens": 2}
    server.http.post("/v1/chat/completions?token=hidden", json=chat, headers=headers)
    server.http.post("/v1/chat/completions", json=chat, headers={"Authorization": "Bearer wrong-key"})
    until(lambda: len(lines) == 2)
    text = "\n".join(line for _, line in lines)
    assert [word for word in ("secret", "sesame", "wrong", "hidden", "Bearer") if word in text] == []
    assert text.startswith("POST /v1/chat/completions 200, ")
    assert lines[1][1].startswith("POST /v1/chat/completions 401, invalid_api_key, 0.0")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/a%0d%0aINFO%20forged", "/a??INFO forged"),
        ("/%1b[2J", "/?[2J"),
        ("/" + "x" * 5000, "/" + "x" * 99 + "…"),
    ],
)
def test_a_path_cannot_forge_a_line(server, lines, until, path, shown):
    assert server.http.get(path).status_code == 404
    until(lambda: lines)
    assert lines[0][1].startswith(f"GET {shown} 404, ")


def test_probes_and_scrapes_that_succeed_are_noise(server, lines, until):
    for path in ("/health", "/ready", "/version", "/metrics", "/v1/models"):
        server.http.get(path)
    until(lambda: len(lines) == 5)
    assert [level for level, _ in lines] == ["DEBUG"] * 4 + ["INFO"]


def send(server, data: bytes) -> bytes:
    """Send bytes and return the answer until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"nonsense\r\n\r\n", "- - 400, bad_http"),
        (b"GET /" + b"x" * 20_000, "- - 431, headers_too_large"),
        (b"GET /a?key=secret HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", "GET /a 431, headers_too_large"),
        (b"POST /\x1b HTTP/1.1\r\nContent-Length: x\r\n\r\n", None),
    ],
    ids=["no HTTP", "long head", "many headers", "bad length"],
)
def test_what_never_reaches_the_application_has_a_line(server, lines, until, data, line):
    assert b"HTTP/1.1 4" in send(server, data)
    until(lambda: [each for level, each in lines if level == "INFO"])
    [found] = [each for level, each in lines if level == "INFO"]
    assert found == line or (line is None and found.endswith("400, bad_http") and found.isprintable())


def test_a_refused_request_is_not_logged_with_the_path_of_the_one_before(server, lines, until):
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"x" * 20_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 431")
    until(lambda: len(lines) == 2)
    assert [line.partition(",")[0] for _, line in lines] == ["GET /version 200", "- - 431"]


def test_a_body_that_is_malformed_is_said_to_be(server, lines, until):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    send(server, head + b"Transfer-Encoding: chunked\r\n\r\nnone\r\n")
    until(lambda: lines)
    assert [line.rpartition(",")[0] for _, line in lines] == ["POST /v1/completions 400, bad_http"]


def test_a_client_that_left_is_told_from_one_that_was_answered():
    assert access_line({"method": "POST", "path": "/v1/completions"}, 0, 1.5) == (
        "POST /v1/completions left, 1.500 s"
    )


def test_it_can_be_turned_off(serve, lines):
    server = serve(access_log=False)
    assert server.http.get("/v1/models").status_code == 200
    assert b" 400 " in send(server, b"nonsense\r\n\r\n")
    server.stop()
    assert lines == []
