"""openai, unmodified: tools, streamed tools and `chat.completions.parse` against our server."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("What time is it in Tokyo?", "time_in", {"city": "Tokyo"}),
    ("Start a timer for 10 minutes.", "start_timer", {"minutes": 10}),
    ("Search the docs for prefix cache.", "find_in_docs", {"query": "prefix cache"}),
]


class Timer(BaseModel):
    """Start a timer."""

    minutes: int


class Answer(BaseModel):
    sure: bool
    colour: Literal["red", "green"]


@pytest.fixture(scope="module")
def client(tool_server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=tool_server, api_key="none", max_retries=0)


def asked(question: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "embedded",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 100,
        **fields,
    }


@pytest.mark.parametrize(("question", "name", "arguments"), CALLS)
def test_auto_calls_the_documented_tools(
    client: openai.OpenAI, tools: Any, question: str, name: str, arguments: Any
) -> None:
    message = client.chat.completions.create(**asked(question, tools=tools)).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    history = [
        {"role": "user", "content": question},
        message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"time": "09:40", "status": "started"}'},
    ]
    answer = client.chat.completions.create(**asked("", tools=tools) | {"messages": history})
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "time_in"}}]
)
def test_streams_of_calls_are_put_together(client: openai.OpenAI, tools: Any, choice: Any) -> None:
    fields = asked(CALLS[0][0], tools=tools, tool_choice=choice)
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert (call.function.name, json.loads(call.function.arguments)) == ("time_in", {"city": "Tokyo"})


@pytest.mark.parametrize("question", ["Hello!", "Tell me a story."])
def test_forced_calls_are_parsed(client: openai.OpenAI, question: str) -> None:
    tool = openai.pydantic_function_tool(Timer)
    named = {"type": "function", "function": {"name": "Timer"}}
    for choice in ("required", named):
        parsed = client.chat.completions.parse(**asked(question, tools=[tool], tool_choice=choice))
        for call in parsed.choices[0].message.tool_calls:
            assert isinstance(call.function.parsed_arguments, Timer)


def test_an_answer_is_parsed_by_its_schema(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**asked("Is grass green?", response_format=Answer))
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_errors_name_the_parameter(client: openai.OpenAI, tools: Any) -> None:
    named = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked("Hi", tools=tools, tool_choice=named))
    assert caught.value.param == "tool_choice"
