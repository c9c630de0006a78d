"""What is not supported is refused by name, and what asks for nothing is passed over."""

from __future__ import annotations

import pytest

from sagellm.engines.server.schema import ChatBody, CompletionBody, Message
from sagellm.engines.server.unsupported import (
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    UNSUPPORTED_STREAM_OPTIONS,
    asks_for_nothing,
)

BODIES = {
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (
        ChatBody,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    ),
}
CASES = [
    (path, name)
    for path, (kind, _) in BODIES.items()
    for name in UNSUPPORTED
    if name not in kind.__struct_fields__
]


def refused(server, path, body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_there_are_more_than_forty_names():
    assert len(UNSUPPORTED) >= 40


@pytest.mark.parametrize(("path", "name"), CASES)
def test_an_unsupported_parameter_is_named(server, path, name):
    error = refused(server, path, {**BODIES[path][1], name: {"some": "thing"}})
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert error["type"] == "invalid_request_error"
    assert f"{name!r} is not supported" in error["message"]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_what_asks_for_nothing_is_passed_over(server, path, name):
    for value in (None, *UNSUPPORTED[name].neutral):
        answer = server.http.post(path, json={**BODIES[path][1], name: value})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("guided_jsn", "guided_json")],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(server, path, name, near):
    error = refused(server, path, {**BODIES[path][1], name: 1})
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert f"Did you mean {near!r}?" in error["message"]


@pytest.mark.parametrize("name", UNSUPPORTED_IN_MESSAGES)
def test_an_unsupported_field_of_a_message_is_named(server, name):
    assert name not in Message.__struct_fields__
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", name: [{"a": 1}]}]}
    error = refused(server, "/v1/chat/completions", body)
    assert (error["param"], error["code"]) == (f"messages[1].{name}", "unsupported_parameter")


@pytest.mark.parametrize("name", UNSUPPORTED_STREAM_OPTIONS)
def test_an_unsupported_option_of_a_stream_is_named(server, name):
    error = refused(
        server, "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {name: True}}
    )
    assert error["param"] == f"stream_options.{name}"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", "video_url"])
def test_parts_that_are_not_text_are_refused_and_no_address_is_opened(server, kind):
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "http://127.0.0.1:1/a.png"}}]
    error = refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert (error["param"], error["code"]) == ("messages[0].content[1].type", "unsupported_parameter")


@pytest.mark.parametrize("role", ["tool", "function"])
def test_messages_of_tools_are_refused(server, role):
    error = refused(server, "/v1/chat/completions", {"messages": [{"role": role, "content": "a"}]})
    assert (error["param"], error["code"]) == ("messages[0].role", "unsupported_parameter")


def test_false_is_not_zero_and_one_is_not_true():
    assert not asks_for_nothing(UNSUPPORTED["store"], 0)
    assert not asks_for_nothing(UNSUPPORTED["best_of"], True)
