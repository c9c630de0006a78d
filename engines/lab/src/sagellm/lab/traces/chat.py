"""Timed chat logs: one object per line with a timestamp and messages, as applications write them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from typing import IO, Any

from sagellm.core import InvalidInputError, Tokenize, TraceReaderProtocol, TraceRequest, pack
from sagellm.lab.traces.lines import first_object, json_lines, number_of

_MILLISECONDS_FROM = 1e11
"""As seconds since 1970 this is the year 5138, so larger numbers are milliseconds."""


class ChatLogReader(TraceReaderProtocol):
    """Reads `timestamp`, `messages` and, if present, `response`, `user`, `conversation_id`.

    A timestamp is in seconds or milliseconds since any moment, or a date and time (ISO 8601). Messages are
    OpenAI's; without a `response`, the last one is the answer if it is the assistant's. Each message is
    tokenized separately, so that a continued conversation begins with the same tokens as before; the embedded
    model's tokenizer is used unless another is given.
    """

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        self._given = tokenize

    def can_read(self, name: str, first_line: str) -> bool:
        """Recognize the format by its keys."""
        del name
        return {"timestamp", "messages"} <= first_object(first_line).keys()

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the lines that are not blank."""
        for line, row in json_lines(lines):
            messages = _messages(row.get("messages"), line)
            response = row.get("response")
            if response is None and messages and messages[-1][0] == "assistant":
                response = messages.pop()[1]
            prompt = [token for message in messages for token in self._tokens(*message)]
            prompt += self._tokens("assistant", "")
            yield TraceRequest(
                _seconds(row.get("timestamp"), line),
                len(prompt),
                len(self._tokenize(_text(response, "response", line))) if response else 0,
                token_ids=pack(prompt),
                tenant=str(row.get("user") or ""),
                conversation=str(row.get("conversation_id") or ""),
            )

    @cached_property
    def _tokenize(self) -> Tokenize:
        return _embedded_tokenizer() if self._given is None else self._given

    def _tokens(self, role: str, text: str) -> list[int]:
        return list(self._tokenize(f"<|im_start|>{role}\n{text}"))


def _embedded_tokenizer() -> Tokenize:
    from sagellm.engines.embedded import embedded_model
    from sagellm.engines.loading.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(embedded_model())
    return lambda text: tokenizer(text, verbose=False)["input_ids"]  # type: ignore[misc]


def _messages(value: object, line: int) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise InvalidInputError(f"line {line}: messages is {value!r:.60}; it must be a list of objects")
    return [(str(one.get("role")), _text(one.get("content"), "content", line)) for one in value]


def _text(value: object, what: str, line: int) -> str:
    """Read a text, or the texts of a message in parts."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        parts: list[Any] = [one for one in value if isinstance(one, dict)]
        return "\n".join(str(part.get("text") or "") for part in parts)
    raise InvalidInputError(f"line {line}: {what} is {value!r:.60}; it must be text")


def _seconds(value: object, line: int) -> float:
    if not isinstance(value, str):
        number = number_of(value, "timestamp", line)
        return number / 1e3 if number > _MILLISECONDS_FROM else number
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidInputError(f"line {line}: timestamp is {value!r}; it must be a date and time") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
