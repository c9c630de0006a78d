"""A simulated client: sends its request until it is answered, and compares every answer with the oracle."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

from sagellm.engines.config.sections import ServerConfig
from sagellm.lab.bench.answer import EventSplitter
from sagellm.lab.bench.http_reader import ResponseReader
from sagellm.lab.bench.records import RequestFailedError
from sagellm.lab.simulation.served.oracle import LETTERS, expected_tokens, text_of
from sagellm.lab.simulation.served.plan import Ask

if TYPE_CHECKING:
    from sagellm.lab.simulation.served.world import World

_ERROR_STATUSES = {429, 500, 503}
_RETRIED_CODES = {"engine_dead", "queue_full", "tenant_queue_full", "too_many_connections", "aborted"}
"""Errors that a valid request may get from a server with faults; it is sent again."""
DEADLY = "engine_died_twice"
"""The error of a request that is not to be sent again."""
ENDS = {"answered", "left", DEADLY}
"""How a client ends."""
_SLOW_READ_BYTES, _PAUSE_S = 64, 0.4
_MOST_PAUSES_S = 40.0
"""A slow reader's pauses in one answer, in all: two such answers in turn end well within the limit."""
_BODY_STALL_S = ServerConfig().body_stall_timeout


class WrongAnswerError(Exception):
    """An answer that no fault excuses."""


class Expected:
    """What one choice of an answer must be."""

    def __init__(self, prompt: tuple[int, ...], ask: Ask) -> None:
        self.tokens = expected_tokens(prompt, ask.max_tokens)
        self.text, self.reason = text_of(self.tokens), "length"
        if ask.stop is not None and ask.stop in self.text:
            end = self.text.index(ask.stop)
            self.text, self.reason = self.text[:end], "stop"
            self.tokens = self.tokens[: end + 1]


class Answer:
    """One answer as it arrives: the text, tokens and end of each choice."""

    def __init__(self, ask: Ask) -> None:
        self._expected = [Expected(prompt, ask) for prompt in ask.prompts for _ in range(ask.num_choices)]
        self._text = [""] * len(self._expected)
        self._tokens: list[list[int]] = [[] for _ in self._expected]
        self._reason: list[str | None] = [None] * len(self._expected)
        self.num_cached: int | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        """Take a chunk or a whole answer. Raises WrongAnswerError at the first wrong token."""
        for choice in chunk["choices"]:
            index, expected = choice["index"], self._expected[choice["index"]]
            if self._reason[index] is not None:
                raise WrongAnswerError(f"choice {index} continues after its end")
            self._text[index] += choice["text"]
            self._tokens[index] += choice["token_ids"]
            self._reason[index] = choice["finish_reason"]
            if not expected.text.startswith(self._text[index]):
                raise WrongAnswerError(
                    f"choice {index} has the text {self._text[index]!r}, which should be {expected.text!r}"
                )
            if tuple(self._tokens[index]) != expected.tokens[: len(self._tokens[index])]:
                raise WrongAnswerError(
                    f"choice {index} has the tokens {self._tokens[index]}, which should be {expected.tokens}"
                )
        if usage := chunk.get("usage"):
            self._check_usage(usage)

    def end(self) -> None:
        """Take the end. Raises WrongAnswerError if something is missing."""
        for index, expected in enumerate(self._expected):
            found = (self._text[index], tuple(self._tokens[index]), self._reason[index])
            if found != (expected.text, expected.tokens, expected.reason):
                raise WrongAnswerError(
                    f"choice {index} ends as {found}, which should be "
                    f"{(expected.text, expected.tokens, expected.reason)}"
                )
        if self.num_cached is None:
            raise WrongAnswerError("the answer has no usage")

    def _check_usage(self, usage: dict[str, Any]) -> None:
        num_tokens = sum(len(expected.tokens) for expected in self._expected)
        if usage["completion_tokens"] != num_tokens:
            raise WrongAnswerError(
                f"usage has {usage['completion_tokens']} tokens; the answer has {num_tokens}"
            )
        self.num_cached = usage["prompt_tokens_details"]["cached_tokens"]


class Client:
    """Sends one request, in as many attempts as it takes."""

    def __init__(self, world: World, ask: Ask) -> None:
        self._world, self.ask = world, ask
        self._random = Random(f"{world.plan.seed}/client {ask.number}")
        self.num_attempts = 0
        self.state = "not begun"

    async def run(self) -> None:
        """Return when the request is answered or refused for good, or the client has left."""
        while True:
            self.num_attempts += 1
            self.state = "waits for an answer"
            try:
                outcome = await self._attempt()
            except (OSError, asyncio.IncompleteReadError, RequestFailedError) as error:
                if isinstance(error, RequestFailedError) and error.kind != "cut":
                    raise WrongAnswerError(str(error)) from error
                outcome = type(error).__name__
            self.state = outcome
            if outcome == DEADLY and (self.num_attempts < 3 or not self._world.may_be_refused(self.ask)):
                raise WrongAnswerError("refused as deadly, and it cannot be what ended two processes")
            self._world.log(f"client {self.ask.number} attempt {self.num_attempts}: {outcome}")
            if outcome in ENDS:
                return
            await asyncio.sleep(self._random.uniform(0.5, 1.5))

    async def _attempt(self) -> str:
        reader, transport = self._world.open_connection(f"client {self.ask.number}")
        try:
            self._world.tenants.note(self.ask)
            transport.write(self._request())
            if self.ask.behaviour == "half close":
                transport.write_eof()
            return await self._read(reader)
        finally:
            transport.abort() if self.ask.behaviour == "leave" else transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        response, answer, body, events = ResponseReader(), Answer(self.ask), b"", EventSplitter()
        num_read, pauses_left_s = 0, _MOST_PAUSES_S
        while not response.is_done:
            if self.ask.behaviour == "leave" and num_read >= self.ask.leaves_after_bytes:
                return "left"
            if self.ask.behaviour == "slow":
                pause_s = min(pauses_left_s, _PAUSE_S * self._random.random())
                pauses_left_s -= pause_s
                await asyncio.sleep(pause_s)
            data = await reader.read(_SLOW_READ_BYTES if self.ask.behaviour == "slow" else 1 << 16)
            num_read += len(data)
            if not data:
                response.end()
            piece = response.feed(data)
            if response.status != 200 or not self.ask.is_streamed:
                body += piece
            elif outcome := self._take_events(answer, events.feed(piece)):
                return outcome
        return self._end(response.status, answer, body)

    def _take_events(self, answer: Answer, events: list[bytes]) -> str | None:
        """Take events; return the outcome if they end the answer."""
        for event in events:
            if event == b"[DONE]":
                return self._finished(answer)
            chunk = json.loads(event)
            if "error" in chunk:
                return self._refused(chunk["error"])
            answer.add(chunk)
        return None

    def _end(self, status: int, answer: Answer, body: bytes) -> str:
        if status != 200:
            if status == 408 and self._world.weather.most_latency_s > _BODY_STALL_S:
                return "body_timeout"  # its body may have been under way for so long
            if status not in _ERROR_STATUSES:
                raise WrongAnswerError(f"status {status}: {body[:200].decode(errors='replace')}")
            return self._refused(json.loads(body)["error"])
        if self.ask.is_streamed:
            raise WrongAnswerError("the stream ends without [DONE]")
        answer.add(json.loads(body))
        return self._finished(answer)

    def _finished(self, answer: Answer) -> str:
        answer.end()
        self._world.tenants.check(self.ask, answer.num_cached or 0, is_first=self.num_attempts == 1)
        return "answered"

    def _refused(self, error: dict[str, Any]) -> str:
        if error["code"] not in {*_RETRIED_CODES, DEADLY}:
            raise WrongAnswerError(f"refused with {error}")
        return str(error["code"])

    def _request(self) -> bytes:
        ask = self.ask
        body: dict[str, Any] = {
            "prompt": [list(prompt) for prompt in ask.prompts],
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "n": ask.num_choices,
            "stream": ask.is_streamed,
            "return_token_ids": True,
        }
        if ask.is_streamed:
            body["stream_options"] = {"include_usage": True}
        if ask.salt:
            body["cache_salt"] = ask.salt
        if ask.stop is not None:
            body["stop"] = [ask.stop]
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {key_of(ask.tenant)}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


class Tenants:
    """Who has asked what: a prompt may only be cached where an earlier one in its namespace begins alike."""

    def __init__(self) -> None:
        self._asked: dict[tuple[int, str], dict[int, Ask]] = {}

    def note(self, ask: Ask) -> None:
        """Record that a request is sent."""
        self._asked.setdefault((ask.tenant, ask.salt), {})[ask.number] = ask

    def check(self, ask: Ask, num_cached: int, *, is_first: bool) -> None:
        """Raise WrongAnswerError if more of a prompt was cached than its namespace can have cached."""
        if len(ask.prompts) * ask.num_choices > 1 or not is_first:
            return
        most = 0
        for other in self._asked[ask.tenant, ask.salt].values():
            if other.number != ask.number:
                for prompt in other.prompts:
                    most = max(most, _num_common(ask.prompts[0], prompt, other.max_tokens))
        if num_cached > most:
            raise WrongAnswerError(
                f"{num_cached} tokens of the prompt were cached; in its namespace at most {most} can be"
            )


def key_of(tenant: int) -> str:
    """Return the API key of a tenant."""
    return f"key-of-tenant-{LETTERS[tenant]}"


def _num_common(prompt: tuple[int, ...], other: tuple[int, ...], max_tokens: int) -> int:
    """Return how many tokens two prompts have in common, the second with its output."""
    whole = other + expected_tokens(other, max_tokens)
    num = 0
    for one, two in zip(prompt, whole, strict=False):
        if one != two:
            break
        num += 1
    return num
