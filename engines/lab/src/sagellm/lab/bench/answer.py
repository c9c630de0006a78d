"""Reads a streamed answer of an OpenAI-compatible server into the record of its request."""

from __future__ import annotations

import json
from typing import Any

from sagellm.lab.bench.http_reader import ResponseReader
from sagellm.lab.bench.records import RequestFailedError, RequestRecord

_VISIBLE_IN_DELTA = ("content", "reasoning_content", "reasoning", "tool_calls")
_FAILED_ENDS = ("error", "abort")
_MAX_ERROR_BYTES = 65_536


class EventSplitter:
    """Takes pieces of a stream and gives the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events that end in `body`; comments and other fields are dropped."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and line in (b"", b"\r"):
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class AnswerReader:
    """Takes the bytes of one answer with the time at which they arrived."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._events = EventSplitter()
        self._error_body = b""
        self._is_complete = False

    def take(self, response: ResponseReader, body: bytes, now_ns: int) -> None:
        """Read what has come. Raises RequestFailedError."""
        if response.status != 200:
            self._error_body += body[: _MAX_ERROR_BYTES - len(self._error_body)]
            return
        if "event-stream" not in response.headers.get("content-type", ""):
            raise RequestFailedError(
                "bad_response",
                f"asked for a stream, got {response.headers.get('content-type', 'no content type')}",
            )
        for event in self._events.feed(body):
            if event == b"[DONE]":
                self._is_complete = True
            else:
                self._take_event(event, now_ns)

    def finish(self, response: ResponseReader) -> None:
        """Judge the answer at its end: a stream without its last event is a failure, not a short answer."""
        if response.status != 200:
            raise RequestFailedError(f"http_{response.status}", error_message(self._error_body))
        record = self._record
        if not self._is_complete or record.finish_reason is None:
            missing = "finish reason" if self._is_complete else "[DONE]"
            raise RequestFailedError("cut", f"the stream ended without its {missing}")
        if record.finish_reason in _FAILED_ENDS:
            raise RequestFailedError("stream_error", f"the finish reason is {record.finish_reason!r}")
        if record.num_output_tokens == 0:
            raise RequestFailedError("empty", "the answer has not one token")

    def _take_event(self, event: bytes, now_ns: int) -> None:
        try:
            data = json.loads(event)
            if data.get("error"):
                raise RequestFailedError("stream_error", error_message(event))
            if data.get("usage"):
                self._take_usage(data["usage"])
            choices = data.get("choices") or ()
            if any(self._take_choice(choice, now_ns) for choice in choices):
                self._record.event_times_ns.append(now_ns)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise RequestFailedError(
                "bad_response", f"an event of the stream is {event[:60]!r}: {error}"
            ) from error

    def _take_choice(self, choice: dict[str, Any], now_ns: int) -> bool:
        """Say whether a choice holds anything visible."""
        if choice.get("finish_reason") is not None:
            self._record.finish_reason, self._record.finish_ns = choice["finish_reason"], now_ns
        if choice.get("text") or choice.get("token_ids"):
            return True
        delta = choice.get("delta")
        return delta is not None and any(delta.get(name) for name in _VISIBLE_IN_DELTA)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        record.num_reported_tokens = int(usage["completion_tokens"])
        record.num_prompt_tokens = int(usage.get("prompt_tokens") or record.num_prompt_tokens)
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            record.num_cached_tokens = int(details["cached_tokens"])
        details = usage.get("completion_tokens_details") or {}
        if details.get("rejected_prediction_tokens") is not None:
            record.num_accepted_tokens = int(details.get("accepted_prediction_tokens") or 0)
            record.num_draft_tokens = record.num_accepted_tokens + int(details["rejected_prediction_tokens"])


def error_message(body: bytes) -> str:
    """Return what a server says about an error: `error.message`, `detail`, or the first line."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail") or error
        return str(message)[:500]
    except (ValueError, AttributeError):
        return body.decode(errors="replace").strip().partition("\n")[0][:200] or "no explanation"
