"""langchain-openai, unmodified: `bind_tools` and `with_structured_output` against our server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

langchain_openai = pytest.importorskip("langchain_openai", reason="not installed: hatch run clients:test")
messages = pytest.importorskip("langchain_core.messages")


class Timer(BaseModel):
    """Start a timer."""

    minutes: int = Field(description="How many minutes")


@pytest.fixture(scope="module")
def model(tool_server: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="embedded", base_url=tool_server, api_key="none", temperature=0, max_tokens=100, max_retries=0
    )


def test_bound_tools_are_called_and_results_answered(model: Any, tools: Any) -> None:
    bound = model.bind_tools(tools)
    question = messages.HumanMessage("What time is it in Tokyo?")
    called = bound.invoke([question])
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("time_in", {"city": "Tokyo"})
    result = messages.ToolMessage('{"time": "09:40"}', tool_call_id=call["id"])
    assert "09:40" in bound.invoke([question, called, result]).content


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("Start a timer for 10 minutes.", "start_timer", {"minutes": 10}),
        ("Search the docs for prefix cache.", "find_in_docs", {"query": "prefix cache"}),
    ],
)
def test_the_other_documented_tools_are_called(
    model: Any, tools: Any, question: str, name: str, arguments: Any
) -> None:
    (call,) = model.bind_tools(tools).invoke(question).tool_calls
    assert (call["name"], call["args"]) == (name, arguments)


@pytest.mark.parametrize("choice", ["any", "required", "time_in"])
def test_bound_tools_are_forced(model: Any, tools: Any, choice: str) -> None:
    calls = model.bind_tools(tools, tool_choice=choice).invoke("Hello!").tool_calls
    assert calls
    assert choice != "time_in" or {call["name"] for call in calls} == {"time_in"}


def test_streamed_calls_add_up(model: Any, tools: Any) -> None:
    chunks = list(model.bind_tools(tools).stream("What time is it in Tokyo?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("time_in", {"city": "Tokyo"})]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_outputs_are_structured(model: Any, method: str) -> None:
    found = model.with_structured_output(Timer, method=method).invoke("Start a timer for 10 minutes.")
    assert isinstance(found, Timer)
