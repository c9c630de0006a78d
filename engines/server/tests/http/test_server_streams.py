"""Streams that fail, clients that leave, engines that die."""

from __future__ import annotations

import json
import socket

import openai
import pytest

from sagellm.core import EngineDeadError, EngineError, InvalidRequestError
from sagellm.testing.patience import PATIENCE_S

BODY = {"prompt": [1, 2], "max_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": "Tell me"}], "ignore_eos": True, "max_tokens": 1800}
LONG = {"prompt": "The river", "max_tokens": 1800, "ignore_eos": True, "n": 2}


def events(answer):
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [part.removeprefix("data: ") for part in parts[:-1]]


def test_a_stream_ends_with_done(scripted):
    lines = events(scripted("a", "b", "length").http.post("/v1/completions", json={**BODY, "stream": True}))
    assert lines[-1] == "[DONE]"
    assert [json.loads(line)["choices"][0]["text"] for line in lines[:-1]] == ["a", "b", ""]


def test_a_failure_is_not_hidden_with_the_output(scripted):
    body = {**BODY, "stream": True, "echo": True, "max_tokens": 0}
    answer = scripted("a", "error").http.post("/v1/completions", json=body)
    assert (answer.status_code, "internal_error" in answer.text) == (500, True)


def test_prompts_that_end_at_once_are_counted_once(scripted):
    """A finished object that grew while it waited to be written is told of twice."""
    server = scripted("a", "b", "length")
    answer = server.http.post("/v1/completions", json={**BODY, "prompt": [[1], [2], [3]]})
    assert answer.status_code == 200, answer.text
    assert [choice["text"] for choice in answer.json()["choices"]] == ["ab"] * 3
    metrics = server.http.get("/metrics").text
    assert 'sagellm:e2e_request_latency_seconds_count{engine="0",model_name="small"} 3.0' in metrics


@pytest.mark.parametrize(
    ("fault", "code", "status"),
    [
        (EngineDeadError("process 4711 at /secret is gone"), "engine_dead", 503),
        (EngineError("KeyError: /secret"), "internal_error", 500),
        (ValueError("0xdeadbeef /secret"), "internal_error", 500),
        ("error", "internal_error", 500),
        ("abort", "aborted", 503),
    ],
    ids=str,
)
class TestFaults:
    def test_before_the_first_token_it_is_a_status(self, scripted, fault, code, status):
        for is_streamed in (True, False):
            answer = scripted(fault).http.post("/v1/completions", json={**BODY, "stream": is_streamed})
            assert answer.status_code == status
            assert answer.json()["error"]["code"] == code
            assert "secret" not in answer.text
            assert ("retry-after" in answer.headers) == (status == 503)

    def test_after_it_the_stream_ends_with_an_event(self, scripted, fault, code, status):
        server = scripted("a", fault)
        answer = server.http.post("/v1/completions", json={**BODY, "stream": True})
        assert answer.status_code == 200
        lines = events(answer)
        assert json.loads(lines[-1])["error"]["code"] == code
        assert "secret" not in answer.text
        assert server.app.state.admission.num_live == 0

    def test_the_client_raises(self, scripted, fault, code, status):
        stream = scripted("a", fault).openai().completions.create(model="small", prompt=[1], stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == code

    def test_a_whole_answer_fails_whole(self, scripted, fault, code, status):
        server = scripted("a", fault)
        assert server.http.post("/v1/completions", json=BODY).status_code == status
        assert server.http.post("/v1/completions", json={**BODY, "prompt": [[1], [2]]}).status_code == status
        assert server.front.closed == 3


def test_one_of_many_that_fails_ends_all(scripted):
    server = scripted("a", EngineError("broken"))
    lines = events(server.http.post("/v1/completions", json={**BODY, "prompt": [[1], [2]], "stream": True}))
    assert "error" in json.loads(lines[-1])
    assert server.front.closed == 2


def test_one_of_many_that_fails_does_not_wait_for_the_others(scripted):
    server = scripted(None)
    add_job = server.front.add_job

    async def add(*args, **options):
        streams = await add_job(*args, **options)
        streams[1]._steps = iter([EngineError("broken")])
        return streams

    server.front.add_job = add
    assert server.http.post("/v1/completions", json={**BODY, "prompt": [[1], [2], [3]]}).status_code == 500
    assert server.front.closed == 3


def test_what_the_engine_refuses_is_the_callers_fault(scripted):
    error = InvalidRequestError("stop_token_ids has 9, which the model does not know")
    answer = scripted("refuse", error).http.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop_token_ids"


def test_an_engine_that_is_gone_takes_nothing(scripted):
    answer = scripted("refuse", EngineDeadError("gone")).http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def send_and_read_a_little(server, path, body, num_bytes):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    if num_bytes:
        assert connection.recv(num_bytes)
    return connection


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", LONG), ("/v1/chat/completions", CHAT)])
def test_a_client_that_leaves_frees_its_blocks(
    server, hold, until, all_blocks_are_back, is_streamed, path, body
):
    engine = server.front.engine
    hold(engine, 5)  # so that no request ends by itself
    connection = send_and_read_a_little(server, path, {**body, "stream": is_streamed}, 100 * is_streamed)
    until(engine.has_unfinished_requests)
    until(lambda: engine.client.core.kv.available_blocks != engine.client.core.kv.total_blocks)
    connection.close()
    until(lambda: not engine.has_unfinished_requests())
    assert all_blocks_are_back(engine)
    until(lambda: server.app.state.admission.num_live == 0)
    assert server.http.get("/health").status_code == 200


def test_many_clients_that_leave_leave_nothing(server, until, all_blocks_are_back):
    connections = [
        send_and_read_a_little(server, "/v1/completions", {**LONG, "stream": bool(index % 2)}, 0)
        for index in range(20)
    ]
    for index, connection in enumerate(connections):
        for _ in range(index % 3):  # so that they leave at different moments
            assert server.http.get("/version").status_code == 200
        connection.close()
    until(
        lambda: server.app.state.admission.num_live == 0 and not server.front.engine.has_unfinished_requests()
    )
    assert all_blocks_are_back(server.front.engine)


def test_a_client_that_leaves_before_the_first_token_is_noticed(scripted, until):
    server = scripted(None)
    for is_streamed in (True, False):
        connection = send_and_read_a_little(server, "/v1/completions", {**BODY, "stream": is_streamed}, 0)
        until(lambda: server.app.state.admission.num_live == 1)
        connection.close()
        until(lambda: server.app.state.admission.num_live == 0)
    assert server.front.closed >= 2


def test_a_connection_serves_one_request_after_another(server):
    with server.http.stream(
        "POST", "/v1/completions", json={**LONG, "max_tokens": 5, "stream": True}
    ) as answer:
        first = answer.read()
    assert first.endswith(b"data: [DONE]\n\n")
    assert server.http.post("/v1/completions", json={**LONG, "max_tokens": 5}).status_code == 200


def test_token_ids_stand_beside_the_text_streamed_or_not(server):
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 6,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["prompt_token_ids"], len(whole["token_ids"])) == ([5, 6, 7], 6)
    for more in ({}, {"logprobs": 1}):
        lines = events(server.http.post("/v1/completions", json={**body, **more, "stream": True}))
        chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[5, 6, 7]] + [None] * (len(chunks) - 1)
        assert len([chunk for chunk in chunks if chunk["token_ids"]]) >= 5  # also those without text
