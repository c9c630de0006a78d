"""POST /v1/chat/completions with reasoning or tool calls: how answers are written that have several parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sagellm.core.protocols.parsers import AnswerPart, Content, Reasoning, ToolCallStart
from sagellm.engines.parsers.answers import Answer
from sagellm.engines.requests.outputs import CompletionOutput, RequestOutput
from sagellm.server.http.answer_reading import AnswerReader, AnswerReading
from sagellm.server.http.chat_shape import ChatShape
from sagellm.server.http.reply import encode_json
from sagellm.server.http.shape import Cursor, Job, end_of, hidden_states


@dataclass(slots=True, kw_only=True)
class _ReadingCursor(Cursor):
    """How much of an answer has been written, and what reads it."""

    reader: AnswerReader


class ParsedChatShape(ChatShape):
    """The assistant's next message, taken apart."""

    def __init__(self, job: Job, reading: AnswerReading) -> None:
        super().__init__(job)
        self._reading = reading

    def cursors(self) -> list[Cursor]:
        """Return a cursor with a reader for each continuation."""
        return [
            _ReadingCursor(prefix=each.prefix, prompt=each.prompt, reader=self._reading.start())
            for each in super().cursors()
        ]

    def choice(self, index: int, output: CompletionOutput, request: RequestOutput) -> Iterator[bytes]:
        """Yield a finished continuation."""
        reader = self._reading.start()
        answer = Answer.of(reader.read(output.text, is_over=True))
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.tool_calls
            ]
        yield b'{"index":%d,"message":%b,"logprobs":' % (index, encode_json(message))
        yield from self._logprobs(output, 0)
        yield _end(output, reader).removesuffix(b"}]")
        yield from hidden_states(output)
        yield b"}"

    def render(self, cursor: Cursor, output: CompletionOutput) -> bytes:
        """Return an event for each new part, preceded the first time by one with the role."""
        assert isinstance(cursor, _ReadingCursor), "made by cursors()"
        is_over = output.finish_reason is not None
        end_of(output)  # raises for one that failed
        deltas = [_delta(part) for part in cursor.reader.read(output.text, is_over=is_over)]
        num_scored = 0 if output.logprobs is None else len(output.logprobs)
        if is_over or (num_scored > cursor.num_scored and not deltas):
            deltas.append({})
        events = []
        if not cursor.has_started:
            cursor.has_started = True
            events.append(self._event(cursor, {"role": "assistant", "content": ""}, b"null", _GOES_ON, 0))
        for number, delta in enumerate(deltas, start=1):
            logprobs = b"null"
            if number == 1:
                logprobs = b"".join(self._logprobs(output, cursor.num_scored))
                cursor.num_scored = num_scored
            end = _end(output, cursor.reader) if is_over and number == len(deltas) else _GOES_ON
            events.append(self._event(cursor, delta, logprobs, end, len(output.token_ids)))
        return b"".join(events)

    def _event(
        self, cursor: Cursor, delta: dict[str, Any], logprobs: bytes, end: bytes, num_tokens: int
    ) -> bytes:
        return b'%b"delta":%b,"logprobs":%b%b%b' % (
            cursor.prefix,
            encode_json(delta),
            logprobs,
            end,
            self.tail(cursor, num_tokens),
        )


_GOES_ON = b',"finish_reason":null}]'


def _delta(part: AnswerPart) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, ToolCallStart):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.call_index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.call_index, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}


def _end(output: CompletionOutput, reader: AnswerReader) -> bytes:
    """Return the end of a choice, which a call ends unless something else did."""
    is_stopped = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    is_call = reader.num_calls > 0 and is_stopped
    return end_of(output, "tool_calls" if is_call else None)
