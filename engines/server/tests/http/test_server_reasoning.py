"""Reasoning over HTTP: what a model thinks is apart from what it answers, whole and streamed."""

from __future__ import annotations

import json

import pytest

from sagellm.engines.embedded import embedded_model
from sagellm.engines.loading.tokenizer import open_tokenizer

PATH = "/v1/chat/completions"
TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }} in <tool_call> tags<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
OPENING = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
SCRIPT = ("<thi", "nk>\nFirst", ", I look.", "\n</th", "ink>\n\n", "The answer", " is 4.", "length")
HELLO = {"messages": [{"role": "user", "content": "2 + 2?"}]}


@pytest.fixture
def thinking(scripted):
    """Start a server over a script, whose template is this."""

    def start(*script, template=TEMPLATE, **settings):
        tokenizer = open_tokenizer(embedded_model())
        tokenizer.chat_template = template
        return scripted(*script, tokenizer=tokenizer, **settings)

    return start


def whole(server, **fields):
    answer = server.http.post(PATH, json={**HELLO, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server, **fields):
    text = server.http.post(PATH, json={**HELLO, "stream": True, **fields}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [each["choices"][0]["delta"] for each in events]


def test_reasoning_is_apart_from_the_content(thinking):
    message = whole(thinking(*SCRIPT))["message"]
    assert message["reasoning_content"] == "First, I look."
    assert message["content"] == "The answer is 4."


def test_a_stream_has_the_reasoning_first_and_no_tags(thinking):
    deltas = streamed(thinking(*SCRIPT))
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:] == [
        {"reasoning_content": "First"},
        {"reasoning_content": ", I look."},
        {"content": "The answer"},
        {"content": " is 4."},
        {},
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_that_is_not_wanted_is_left_out(thinking, is_streamed):
    server = thinking(*SCRIPT)
    if is_streamed:
        found = [key for delta in streamed(server, include_reasoning=False) for key in delta]
        assert "reasoning_content" not in found
    else:
        message = whole(server, include_reasoning=False)["message"]
        assert (message["content"], "reasoning_content" in message) == ("The answer is 4.", False)


def test_a_template_that_begins_the_reasoning_itself(thinking):
    message = whole(thinking("I look.\n</think>\n\n4.", "length", template=OPENING))["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", "4.")


def test_reasoning_that_is_cut_short_leaves_no_content(thinking):
    message = whole(thinking("<think>\nFirst, ", "length"))["message"]
    assert (message["reasoning_content"], message["content"]) == ("First,", "")


def test_a_call_may_follow_reasoning(thinking):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    server = thinking("<think>\nI add <tool_call>.\n</think>\n\n", call, "length")
    tools = [{"type": "function", "function": {"name": "add"}}]
    message = whole(server, tools=tools)["message"]
    assert message["reasoning_content"] == "I add <tool_call>."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


def test_null_leaves_the_tags_in_the_content(thinking):
    message = whole(thinking(*SCRIPT, reasoning_parser="null"))["message"]
    assert message["content"] == "<think>\nFirst, I look.\n</think>\n\nThe answer is 4."


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), (None, True)])
def test_effort_is_told_to_the_template(thinking, effort, thinks):
    server = thinking("Yes.", "length")
    body = {**HELLO, "reasoning_effort": effort, "max_tokens": 4}
    answer = server.http.post(PATH, json=body)
    plain = server.http.post("/tokenize", json=HELLO).json()["count"]
    assert (answer.json()["usage"]["prompt_tokens"] == plain) == thinks
    assert "x-sagellm-ignored" not in answer.headers
    assert answer.json()["choices"][0]["message"]["content"] == "Yes."


def test_what_a_template_does_not_read_is_ignored_and_listed(thinking):
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    turn = {"role": "assistant", "content": "4.", "reasoning_content": "I look."}
    body = {"messages": [*HELLO["messages"], turn], "reasoning_effort": "high"}
    ignoring = thinking("Yes.", "length", template=plain).http.post(PATH, json=body)
    assert ignoring.headers["x-sagellm-ignored"] == "messages.reasoning_content, reasoning_effort"
    reading = thinking("Yes.", "length").http.post(PATH, json=body)
    assert "x-sagellm-ignored" not in reading.headers


def test_the_history_gives_the_reasoning_to_the_template(thinking):
    server = thinking("Yes.", "length")

    def count(**fields):
        turn = {"role": "assistant", "content": "4.", **fields}
        return server.http.post("/tokenize", json={"messages": [turn]}).json()["count"]

    assert count(reasoning_content="I look.") > count()
    assert count(reasoning="I look.") == count(reasoning_content="I look.")


@pytest.mark.parametrize("template", [TEMPLATE, OPENING], ids=["the model opens it", "the prompt opens it"])
def test_what_comes_after_the_reasoning_must_match(thinking, template):
    server = thinking("I look.</think>", '{"a": 4}', "length", template=template)
    whole(server, response_format={"type": "json_object"})
    asked = server.front.requests[-1]["params"].structured_outputs
    assert asked.kind == "structural_tag"
    assert "</think>" in asked.text
    whole(server, response_format={"type": "json_object"}, chat_template_kwargs={"enable_thinking": False})
    asked = server.front.requests[-1]["params"].structured_outputs
    assert asked.kind == "json_object"  # there is no reasoning to come after
