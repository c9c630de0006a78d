"""llama-index, unmodified: structured output and tool calls against our server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

openai_like = pytest.importorskip(
    "llama_index.llms.openai_like", reason="not installed: hatch run clients:test"
)
prompts = pytest.importorskip("llama_index.core.prompts")
core_tools = pytest.importorskip("llama_index.core.tools")


class Timer(BaseModel):
    """Start a timer."""

    minutes: int = Field(description="How many minutes")


@pytest.fixture(scope="module")
def model(tool_server: str) -> Any:
    return openai_like.OpenAILike(
        model="embedded",
        api_base=tool_server,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )


def function_tools() -> list[Any]:
    def time_in(city: str) -> str:
        return f"09:40 in {city}"

    def start_timer(minutes: int) -> str:
        return f"{minutes} minutes"

    def find_in_docs(query: str) -> str:
        return query

    abouts = ("Get the local time in a city.", "Start a timer.", "Search the documentation.")
    functions = zip((time_in, start_timer, find_in_docs), abouts, strict=True)
    return [
        core_tools.FunctionTool.from_defaults(function, description=about) for function, about in functions
    ]


def test_a_program_returns_its_class(model: Any) -> None:
    prompt = prompts.PromptTemplate("Start a timer for 10 minutes.")
    assert isinstance(model.structured_predict(Timer, prompt), Timer)


def test_a_structured_model_returns_its_class(model: Any) -> None:
    answer = model.as_structured_llm(Timer).complete("Start a timer for 10 minutes.")
    assert isinstance(answer.raw, Timer)


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("What time is it in Tokyo?", "time_in"),
        ("Start a timer for 10 minutes.", "start_timer"),
        ("Search the docs for prefix cache.", "find_in_docs"),
    ],
)
def test_tools_are_called(model: Any, question: str, name: str) -> None:
    answer = model.chat_with_tools(function_tools(), user_msg=question)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == name


def test_calls_are_forced(model: Any) -> None:
    answer = model.chat_with_tools(function_tools(), user_msg="Hello!", tool_required=True)
    assert model.get_tool_calls_from_response(answer)
