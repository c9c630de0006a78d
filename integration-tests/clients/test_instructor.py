"""instructor, unmodified: its mode TOOLS against our server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

instructor = pytest.importorskip("instructor", reason="not installed: hatch run clients:test")


class Timer(BaseModel):
    """Start a timer."""

    minutes: int = Field(description="How many minutes")


class Contact(BaseModel):
    name: str = Field(max_length=40)
    emails: list[str] = Field(max_length=2)


def client(url: str, mode: Any) -> Any:
    plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
@pytest.mark.parametrize("kind", [Timer, Contact])
def test_a_model_is_returned_without_a_second_try(tool_server: str, mode: str, kind: type[BaseModel]) -> None:
    asked = [{"role": "user", "content": "Start a timer for 10 minutes."}]
    found = client(tool_server, instructor.Mode[mode]).chat.completions.create(
        model="embedded", messages=asked, response_model=kind, max_retries=0, temperature=0, max_tokens=300
    )
    assert isinstance(found, kind)


def test_partial_models_are_streamed(tool_server: str) -> None:
    asked = [{"role": "user", "content": "Start a timer for 10 minutes."}]
    parts = list(
        client(tool_server, instructor.Mode.TOOLS).chat.completions.create_partial(
            model="embedded", messages=asked, response_model=Timer, temperature=0, max_tokens=100
        )
    )
    assert isinstance(parts[-1].minutes, int)
