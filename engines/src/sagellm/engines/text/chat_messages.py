"""The messages of a conversation, as callers write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core import InvalidRequestError
from sagellm.engines.text.chat_tools import read_calls

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `token_ids` are those with which the model wrote `content`, if known.

    `tool_calls` have OpenAI's form, with arguments as text; `tool_call_id` says to which of them a message of
    the role "tool" is the result.
    """

    role: str
    content: str
    name: str | None = None
    token_ids: Sequence[int] = ()
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    @property
    def num_characters(self) -> int:
        """Characters of all its texts."""
        num = len(self.content) + len(self.reasoning or "")
        for call in self.tool_calls:
            num += len(call["function"]["name"]) + len(call["function"]["arguments"])
        return num


Message = ChatMessage | Mapping[str, Any]
"""A ChatMessage, or a mapping like OpenAI's: role, content (a text, or parts of text), perhaps name;
tool_calls and reasoning_content of an assistant, tool_call_id of a tool."""


def read_conversations(messages: object) -> list[list[ChatMessage]]:
    """Read one conversation, or a list of them. Raises InvalidRequestError."""
    entries = _listed(messages, "messages")
    if any(isinstance(entry, ChatMessage | Mapping) for entry in entries):
        return [read_messages(entries)]
    return [read_messages(entry) for entry in entries]


def read_messages(messages: object) -> list[ChatMessage]:
    """Read the messages of a conversation. Raises InvalidRequestError."""
    return [_read(entry, f"messages[{index}]") for index, entry in enumerate(_listed(messages, "messages"))]


def _listed(value: object, what: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping | ChatMessage) or not isinstance(value, Iterable):
        raise InvalidRequestError(
            f"{what} is of type {type(value).__name__}; give a list of messages such as "
            '{"role": "user", "content": "Hello"}'
        )
    entries = list(value)
    if not entries:
        raise InvalidRequestError(f"{what} is empty; give at least one message")
    return entries


def _read(message: object, where: str) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is of type {type(message).__name__}; it must be a mapping")
    unknown = [key for key in message if key not in _KEYS]
    if unknown:
        raise InvalidRequestError(f"{where} has the key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    role, name = message.get("role"), message.get("name")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}: role is {role!r}; it must be a text such as 'user'")
    texts = {key: message.get(key) for key in ("name", "tool_call_id", "reasoning_content")}
    for key, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"{where}: {key} is {text!r}; it must be a text")
    calls = message.get("tool_calls")
    content = message.get("content")
    return ChatMessage(
        role,
        "" if content is None and calls else _content(content, where),
        name,
        tool_calls=read_calls(calls, where) if calls else (),
        tool_call_id=texts["tool_call_id"],
        reasoning=texts["reasoning_content"],
    )


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Iterable) and not isinstance(content, bytes | Mapping):
        return "\n".join(_part(part, where) for part in content)
    raise InvalidRequestError(
        f"{where}: content is of type {type(content).__name__}; it must be a text, or a list of parts"
    )


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError(f'{where}: a part of content is not {{"type": "text", "text": …}}')
