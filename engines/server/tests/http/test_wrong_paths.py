"""What is said to a request for a path that is not served."""

from __future__ import annotations

import pytest

from sagellm.server.http.wrong_paths import FOREIGN_PATHS, served_paths


@pytest.fixture(scope="module")
def ask(server):
    def get(path):
        answer = server.http.get(path)
        assert answer.status_code == 404, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        return answer.json()["error"]

    return get


@pytest.mark.parametrize(
    ("path", "owner", "instead"),
    [
        ("/v1/messages", "Anthropic's Messages API", "use POST /v1/chat/completions"),
        ("/v1/messages/count_tokens", "Anthropic's Messages API", "use POST /tokenize"),
        ("/v1/responses", "OpenAI's Responses API", "use POST /v1/chat/completions"),
        ("/v1/responses/resp_1/cancel", "OpenAI's Responses API", "use POST /v1/chat/completions"),
        ("/api/chat", "Ollama's API", "use POST /v1/chat/completions"),
        ("/api/tags/", "Ollama's API", "use GET /v1/models"),
        ("/v1/audio/speech", "OpenAI's audio API", "it generates text from text"),
    ],
)
def test_a_path_of_another_api_is_told_which_and_what_to_use(ask, path, owner, instead):
    error = ask(path)
    assert error["code"] == "no_such_path"
    assert error["message"].startswith(f"this server has no path {path}, which belongs to {owner};")
    assert error["message"].endswith(f"; {instead}")


def test_what_to_use_is_served(server):
    served = {f"{method} {path}" for path, method in served_paths(server.app.routes).items()}
    assert {instead for _, instead in FOREIGN_PATHS.values() if instead} <= served
    assert not FOREIGN_PATHS.keys() & served_paths(server.app.routes).keys()


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"])
def test_a_base_address_with_a_mistake_is_told_the_nearest_path(ask, path):
    assert f"this server has no path {path}. Did you mean '/v1/chat/completions'?" in ask(path)["message"]


def test_any_other_path_is_told_all_that_are_served(server, ask):
    message = ask("/nothing")["message"]
    assert message.startswith("this server has no path /nothing. It has GET /, ")
    for path, method in served_paths(server.app.routes).items():
        assert f"{method} {path}" in message


@pytest.mark.parametrize("path", ["/" + "x" * 5000, "/a%0d%0aSet-Cookie:%20b", "/%1b[2J", "/v1/%ff"])
def test_a_path_cannot_forge_an_answer(ask, path):
    message = ask(path)["message"]
    assert message.isprintable()
    assert len(message) <= 401


def test_a_model_that_is_not_served_is_no_wrong_path(ask):
    error = ask("/v1/models/other")
    assert (error["code"], "this server has small" in error["message"]) == ("model_not_found", True)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [("/v1/messages", 404, "no_such_path"), ("/version", 405, "wrong_method"), ("/tokenize", 415, None)],
)
def test_a_form_is_told_of_its_wrong_path_before_its_type(server, path, status, code):
    answer = server.http.post(path, data={"model": "small"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code or "unsupported_media_type")
