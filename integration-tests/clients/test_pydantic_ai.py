"""pydantic-ai, unmodified: an agent with tools and one with an output type against our server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

pydantic_ai = pytest.importorskip("pydantic_ai", reason="not installed: hatch run clients:test")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")


class Timer(BaseModel):
    """Start a timer."""

    minutes: int = Field(description="How many minutes")


@pytest.fixture
def model(tool_server: str) -> Any:
    provider = providers.OpenAIProvider(base_url=tool_server, api_key="none")
    return models.OpenAIChatModel("embedded", provider=provider)


SETTINGS = {"temperature": 0, "max_tokens": 100}


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What time is it in Tokyo?", ("time_in", "Tokyo")),
        ("Start a timer for 10 minutes.", ("start_timer", 10)),
        ("Search the docs for prefix cache.", ("find_in_docs", "prefix cache")),
    ],
)
def test_an_agent_calls_its_tools_and_answers(model: Any, question: str, expected: tuple[str, Any]) -> None:
    agent = pydantic_ai.Agent(model, model_settings=SETTINGS)
    called: list[tuple[str, Any]] = []

    @agent.tool_plain
    def time_in(city: str) -> dict[str, str]:
        """Get the local time in a city."""
        called.append(("time_in", city))
        return {"time": "09:40"}

    @agent.tool_plain
    def start_timer(minutes: int) -> dict[str, str]:
        """Start a timer."""
        called.append(("start_timer", minutes))
        return {"status": "started"}

    @agent.tool_plain
    def find_in_docs(query: str) -> dict[str, Any]:
        """Search the documentation."""
        called.append(("find_in_docs", query))
        return {"page": "cache.md", "line": 12}

    result = agent.run_sync(question)
    assert called[0] == expected
    assert result.output


@pytest.mark.parametrize("output", ["tool", "native"])
def test_an_output_type_is_forced(model: Any, output: str) -> None:
    kind = Timer if output == "tool" else pydantic_ai.NativeOutput(Timer)
    agent = pydantic_ai.Agent(model, output_type=kind, model_settings=SETTINGS, retries=0)
    assert isinstance(agent.run_sync("Start a timer for 10 minutes.").output, Timer)
