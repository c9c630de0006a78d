"""Structured outputs over HTTP: each name for them, and refusals before the first event."""

from __future__ import annotations

import json

import pytest

from sagellm.core import PluginRegistry, Provider, hookimpl

CHOICES = ["yes", "no, not at all", "perhaps"]
BODIES = {
    "/v1/completions": {"prompt": "Is it far?", "max_tokens": 30},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Is it far?"}], "max_tokens": 30},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}


class Plugin:
    SAGELLM_API = 0

    @hookimpl
    def sagellm_providers(self):
        target = "sagellm.engines.testing.choice_grammar:ChoiceGrammar"
        return [Provider("grammar", "choices", target, "for tests")]


@pytest.fixture(scope="module")
def server(serve):
    registry = PluginRegistry.load()
    registry.register(Plugin(), distribution="for-tests")
    return serve(engine={"registry": registry, "grammar_backend": "choices"})


@pytest.fixture(params=BODIES)
def path(request):
    return request.param


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs": {"choice": CHOICES}},
        {"guided_choice": CHOICES},
        {"structured_outputs": {"choice": CHOICES}, "response_format": {"type": "text"}, "guided_json": None},
    ],
)
def test_an_answer_is_one_of_the_choices(server, path, given):
    answer = server.http.post(path, json={**BODIES[path], **given, "n": 3})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert text_of(choice) in CHOICES
        assert choice["finish_reason"] == "stop"


def test_a_stream_is_one_of_the_choices(server):
    client = server.openai()
    events = client.chat.completions.create(
        model="small",
        messages=BODIES["/v1/chat/completions"]["messages"],
        stream=True,
        extra_body={"structured_outputs": {"choice": CHOICES}},
    )
    assert "".join(event.choices[0].delta.content or "" for event in events) in CHOICES


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
    ],
)
def test_what_cannot_be_compiled_is_a_400_before_the_first_event(server, path, given, is_streamed):
    answer = server.http.post(path, json={**BODIES[path], **given, "stream": is_streamed})
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert "is not supported; give a choice of texts" in error["message"]
    assert error["param"] == next(iter(given)), "the request's name for it, not the engine's"
    assert error["message"].startswith(f"{error['param']}: ")


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"response_format": {"type": "jsn_object"}}, "response_format.type", "Did you mean 'json_object'?"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema",
            "has no 'schema'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a name and a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": True}}},
            "response_format.json_schema.strickt",
            "Did you mean 'strict'?",
        ),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "Did you mean 'json'?"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "it must have one"),
        ({"guided_choice": []}, "guided_choice", "choice has no text; give one or more"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_regex", "give one of them"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "--grammar-backend"),
        ({"regex": "a"}, "regex", "give structured_outputs="),
    ],
)
def test_what_is_wrong_is_named(server, path, given, param, told):
    answer = server.http.post(path, json={**BODIES[path], **given})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert told in error["message"]


def test_metrics_count_kinds_masks_and_refusals(server, until):
    def figure(name):
        page = server.http.get("/metrics").text
        lines = [line for line in page.splitlines() if line.startswith(f"sagellm:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before = {name: figure(f"structured_output_{name}_total") for name in ("requests", "refused", "masks")}
    server.http.post("/v1/completions", json={**BODIES["/v1/completions"], "guided_choice": ["a b c"]})
    server.http.post("/v1/completions", json={**BODIES["/v1/completions"], "guided_regex": "a"})
    until(lambda: figure("structured_output_requests_total") == before["requests"] + 2)
    assert figure("structured_output_refused_total") == before["refused"] + 1
    assert figure("structured_output_masks_total") > before["masks"]
    assert 'kind="choice"' in server.http.get("/metrics").text
    assert figure("num_requests_preparing") == 0


def test_a_schema_is_answered_by_xgrammar_in_any_order_of_keys(serve):
    pytest.importorskip("xgrammar")
    server = serve()
    answer = server.http.post(
        "/v1/chat/completions",
        json={
            **BODIES["/v1/chat/completions"],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True},
            },
        },
    )
    assert answer.status_code == 200, answer.text
    assert json.loads(text_of(answer.json()["choices"][0]))["a"] <= 9
    refused = server.http.post(
        "/v1/completions",
        json={**BODIES["/v1/completions"], "stream": True, "guided_json": {"not": {"type": "null"}}},
    )
    assert refused.status_code == 400
    assert "/not: this keyword is not supported" in refused.json()["error"]["message"]
