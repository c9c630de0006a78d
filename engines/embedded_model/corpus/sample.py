"""What the corpus is made of: dialogues, and passages of plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user, assistant or tool."""

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()  # {"name": …, "arguments": {…}}, by the assistant


@dataclass(frozen=True)
class Dialogue:
    """Turns that the chat template writes out; `tools` are function schemas as OpenAI's API takes them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Passage:
    """Text without turns."""

    text: str


Sample = Dialogue | Passage
