"""What would change the answer is refused by name; what would not is ignored, and listed in a header."""

from __future__ import annotations

import json

import pytest

from sagellm.server.http.body_schema import ChatBody, CompletionBody, Message
from sagellm.server.http.errors import APIError
from sagellm.server.http.parsing import parse_now
from sagellm.server.http.unsupported import (
    IGNORED,
    IGNORED_IN_MESSAGES,
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    UNUSED_IF_NONE,
    asks_for_nothing,
)

BODIES = {
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (
        ChatBody,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    ),
}
EXAMPLES = {dict: {"some": "thing"}, bool: True, str: "Let me think.", list: [{"some": "thing"}]}
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
    assert "--lenient" in error["message"]


@pytest.mark.parametrize("name", UNSUPPORTED_IN_MESSAGES)
def test_an_unsupported_field_of_a_message_is_named(server, name):
    assert name not in Message.__struct_fields__
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", name: [{"a": 1}]}]}
    error = refused(server, "/v1/chat/completions", body)
    assert (error["param"], error["code"]) == (f"messages[1].{name}", "unsupported_parameter")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_does_not_change_the_answer_is_listed(server, path, name):
    body = {**BODIES[path][1], "temperature": 0}
    plain = server.http.post(path, json=body)
    assert "x-sagellm-ignored" not in plain.headers
    answer = server.http.post(path, json={**body, name: EXAMPLES[IGNORED[name]]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sagellm-ignored"] == name
    assert answer.json()["choices"] == plain.json()["choices"]
    assert "x-sagellm-ignored" not in server.http.post(path, json={**body, name: None}).headers


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"store": "yes"}, "store: expected `bool`, got `str`"),
        ({"metadata": True}, "metadata: expected `object`, got `bool`"),
        ({"service_tier": 3}, "service_tier: expected `str`, got `int`"),
        (
            {"messages": [{"role": "user", "content": "a", "annotations": "b"}]},
            "messages[0].annotations: expected `array`, got `str`",
        ),
    ],
)
def test_what_is_ignored_must_have_its_type(fields, told):
    with pytest.raises(APIError) as caught:
        parse_now(json.dumps({**BODIES["/v1/chat/completions"][1], **fields}).encode(), ChatBody)
    assert (caught.value.status, caught.value.param) == (400, told.partition(":")[0])
    assert caught.value.message == told


def test_streams_and_refusals_list_what_is_ignored(server):
    body = {"prompt": "a", "max_tokens": 1, "metadata": {"run": "7"}, "store": True}
    streamed = server.http.post("/v1/completions", json={**body, "stream": True})
    assert streamed.headers["x-sagellm-ignored"] == "metadata, store"
    refused_later = server.http.post("/v1/completions", json={**body, "model": "other"})
    assert refused_later.headers["x-sagellm-ignored"] == "metadata, store"


def test_what_accompanied_an_earlier_answer_is_listed_once(server):
    def ask(**fields):
        turn = {"role": "assistant", "content": "Yes.", **fields}
        messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}, turn]
        body = {"messages": messages, "max_tokens": 2, "temperature": 0}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    plain = ask()
    for name in sorted(IGNORED_IN_MESSAGES):
        answer = ask(**{name: EXAMPLES[IGNORED_IN_MESSAGES[name]]})
        assert answer.headers["x-sagellm-ignored"] == f"messages.{name}"
        assert answer.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]


def test_unknown_options_of_a_stream_are_listed_and_no_name_spoils_the_header(server):
    options = {"include_obfuscation": False, "a\r\nset-cookie: b": 1, "ü": 2, "c" * 1000: 3}
    body = {"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": options}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-sagellm-ignored"] == (
        f"stream_options.include_obfuscation, ?, stream_options.{'c' * 64}"
    )
    assert "set-cookie" not in answer.headers
    many = {**body, "stream_options": {f"option{number}": 1 for number in range(10_000)}}
    listed = server.http.post("/v1/completions", json=many).headers["x-sagellm-ignored"]
    assert listed.endswith("option31, ...")
    assert len(listed) < 2000


@pytest.mark.parametrize(("choice", "listed"), UNUSED_IF_NONE.items())
def test_tools_that_may_not_be_called_are_ignored(server, choice, listed):
    path = "/v1/chat/completions"
    body = {**BODIES[path][1], "temperature": 0}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    plain = server.http.post(path, json=body)
    answer = server.http.post(path, json={**body, choice: "none", listed: tools})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sagellm-ignored"] == listed
    assert answer.json()["choices"] == plain.json()["choices"]
    assert answer.json()["usage"] == plain.json()["usage"], "they do not reach the prompt"
    for other in ("auto", "required", {"type": "function"}):
        assert refused(server, path, {**body, choice: other, listed: tools})["param"] in (choice, listed)
    assert refused(server, path, {**body, choice: "none", listed: {"a": 1}})["code"] == "invalid_value"


@pytest.fixture(scope="module")
def lenient(serve):
    return serve(lenient=True)


class TestLenient:
    """With `--lenient`, fields that no table knows are ignored and listed, and nothing else changes."""

    @pytest.mark.parametrize("path", BODIES)
    def test_an_unknown_field_is_listed_and_changes_nothing(self, lenient, path):
        body = {**BODIES[path][1], "temperature": 0}
        plain = lenient.http.post(path, json=body)
        odd = {"mirostat": 2, "temprature": "hot", "deep": {"a": [None]}, "a\r\nset-cookie: b": 1, "ü": None}
        answer = lenient.http.post(path, json={**body, **odd})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-sagellm-ignored"] == "mirostat, temprature, deep, ?"
        assert "set-cookie" not in answer.headers
        assert answer.json()["choices"] == plain.json()["choices"]

    def test_fields_of_messages_and_their_parts_are_listed_once(self, lenient):
        part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [part, part], "id": "7"}] * 3
        answer = lenient.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-sagellm-ignored"] == "messages.content.cache_control, messages.id"

    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize("name", ["functions", "thinking_token_budget", "logits_processors"])
    def test_what_would_change_the_answer_is_refused_all_the_same(self, lenient, path, name):
        error = refused(lenient, path, {**BODIES[path][1], name: {"some": "thing"}})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")

    def test_known_fields_keep_their_limits(self, lenient):
        for fields in ({"n": 10**9}, {"temperature": "hot"}, {"stop": [""]}):
            assert refused(lenient, "/v1/completions", {"prompt": "a", **fields})["code"] == "invalid_value"
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}
        error = refused(lenient, "/v1/chat/completions", {"messages": [image]})
        assert error["param"] == "messages[0].content[0].type"

    def test_the_list_and_the_fields_of_a_message_are_bounded(self, lenient):
        body = {"prompt": "a", "max_tokens": 1}
        many = {f"{number}{'x' * 94}": 1 for number in range(99)}
        listed = lenient.http.post("/v1/completions", json={**body, **many}).headers["x-sagellm-ignored"]
        assert listed.endswith(", ...")
        assert len(listed) < 4096
        message = {"role": "user", "content": "a", **{f"field{number}": 1 for number in range(63)}}
        error = refused(lenient, "/v1/chat/completions", {"messages": [message]})
        assert error["message"] == "messages[0]: 65 fields; there may be at most 64"
        too_many = {f"field{number}": 1 for number in range(600)}
        error = refused(lenient, "/v1/completions", {**body, **too_many})
        assert error["code"] == "too_deep"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", "video_url"])
def test_parts_that_are_not_text_are_refused_and_no_address_is_opened(server, kind):
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "http://127.0.0.1:1/a.png"}}]
    error = refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert (error["param"], error["code"]) == ("messages[0].content[1].type", "unsupported_parameter")
    assert error["message"].endswith("the models here read text; send parts of the type 'text' alone")


def test_messages_of_functions_are_refused_with_what_replaced_them(server):
    error = refused(server, "/v1/chat/completions", {"messages": [{"role": "function", "content": "a"}]})
    assert (error["param"], error["code"]) == ("messages[0].role", "unsupported_parameter")
    assert "'tool'" in error["message"]


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        (CompletionBody, {"temprature": 1, "prompt": "a", "n": 0}, "n"),
        (
            ChatBody,
            {"messages": [{"role": "function", "content": "b"}], "functions": [1]},
            "messages[0].role",
        ),
    ],
)
def test_fields_that_are_known_are_read_before_the_others_are_refused(kind, body, named):
    with pytest.raises(APIError) as caught:
        parse_now(json.dumps(body).encode(), kind)
    assert caught.value.param == named


def test_false_is_not_zero_and_one_is_not_true():
    assert not asks_for_nothing(UNSUPPORTED["use_beam_search"], 0)
    assert not asks_for_nothing(UNSUPPORTED["best_of"], True)
