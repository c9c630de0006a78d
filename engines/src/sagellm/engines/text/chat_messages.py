"""The messages of a conversation, as callers write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core import InvalidRequestError

_KEYS = ("role", "content", "name")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `token_ids` are those with which the model wrote `content`, if known."""

    role: str
    content: str
    name: str | None = None
    token_ids: Sequence[int] = ()


Message = ChatMessage | Mapping[str, Any]
"""A ChatMessage, or a mapping like OpenAI's: role, content (a text, or parts of text), perhaps name."""


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
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError(f"{where}: name is {name!r}; it must be a text")
    return ChatMessage(role, _content(message.get("content"), where), name)


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
