"""Sends load: requests at their times, or each when the one before is answered; one by one or in sessions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from sagellm.lab.bench.answer import AnswerReader
from sagellm.lab.bench.http_client import HTTPClient
from sagellm.lab.bench.records import RequestFailedError, RequestRecord, now_ns

if TYPE_CHECKING:
    from sagellm.lab.bench.workloads import Session, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request whose body is ready, so that only sending it is left to do under load.

    It is due so long after the start or, in a session, after the answer to the request before; in a closed
    loop, at once.
    """

    due_s: float
    body: bytes
    num_prompt_tokens: int
    num_asked_tokens: int
    turn: tuple[Session, Turn] | None = None  # that it is


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """What was sent and received between two moments, in the order of arrival."""

    records: list[RequestRecord]
    start_ns: int
    end_ns: int
    max_running: int
    late_s: list[float]  # how late each session began; empty in a closed loop

    @property
    def sent(self) -> list[tuple[Session, Turn]]:
        """The session and turn of each record of a load of sessions."""
        return [one.turn for one in self.records if one.turn is not None]


def streamed_body(**fields: Any) -> bytes:
    """Write the body of a request for a stream that ends with the usage."""
    body = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    return json.dumps(body, separators=(",", ":")).encode()


class LoadDriver:
    """Applies one load to one path of a server, and reads the answers in this event loop."""

    def __init__(self, client: HTTPClient, path: str, *, timeout_s: float) -> None:
        self._client = client
        self._path = path
        self._timeout_s = timeout_s
        self._start_ns, self._until_ns = 0, inf
        self._records: list[RequestRecord] = []
        self._running: dict[int, RequestRecord] = {}
        self._max_running = 0
        self._num_ended_tokens = 0
        self._late_s: list[float] = []

    async def run(
        self,
        sessions: Iterable[Iterable[PlannedRequest]],
        *,
        concurrency: int | None,
        is_closed_loop: bool,
        duration_s: float = inf,
    ) -> LoadRun:
        """Send all that begins within the duration, and wait for all answers.

        In a closed loop, `concurrency` callers each send their next request when the last one is answered.
        Otherwise requests start at their times, `concurrency` limits how many run at once, and those waiting
        for a slot count as arrived. The requests of a session follow one another.
        """
        self._start_ns = now_ns()
        self._until_ns = self._start_ns + duration_s * 1e9
        if is_closed_loop:
            shared = iter(sessions)
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency or 1):
                    group.create_task(self._call(shared))
        else:
            await self._send_in_time(sessions, concurrency)
        return LoadRun(
            records=self._records,
            start_ns=self._start_ns,
            end_ns=max((record.end_ns for record in self._records), default=self._start_ns),
            max_running=self._max_running,
            late_s=self._late_s,
        )

    @property
    def num_tokens(self) -> int:
        """Output tokens so far: one per event; for an answer that has ended, all that were requested."""
        running = self._running.values()
        return self._num_ended_tokens + sum(
            min(len(one.event_times_ns), one.num_asked_tokens) for one in running
        )

    @property
    def _left_s(self) -> float:
        return max(0.0, (self._until_ns - now_ns()) / 1e9)

    async def _call(self, sessions: Iterator[Iterable[PlannedRequest]]) -> None:
        for session in sessions:
            for planned in session:
                if not self._left_s:
                    return
                await self._send(planned, self._arrived(planned))

    async def _send_in_time(
        self, sessions: Iterable[Iterable[PlannedRequest]], concurrency: int | None
    ) -> None:
        places = asyncio.Semaphore(concurrency) if concurrency else nullcontext()

        async def converse(
            planned: PlannedRequest, record: RequestRecord, further: Iterator[PlannedRequest]
        ) -> None:
            async with places:
                await self._send(planned, record)
            for planned in further:
                await asyncio.sleep(planned.due_s)
                if not self._left_s:
                    return
                record = self._arrived(planned)
                async with places:
                    await self._send(planned, record)

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                further = iter(session)
                first = next(further)
                wait_s = first.due_s - (now_ns() - self._start_ns) / 1e9
                if wait_s > 0:
                    await asyncio.sleep(min(wait_s, self._left_s))
                if not self._left_s:
                    return
                record = self._arrived(first)
                self._late_s.append((record.arrival_ns - self._start_ns) / 1e9 - first.due_s)
                group.create_task(converse(first, record, further))

    def _arrived(self, planned: PlannedRequest) -> RequestRecord:
        record = RequestRecord(
            arrival_ns=now_ns(),
            num_asked_tokens=planned.num_asked_tokens,
            num_prompt_tokens=planned.num_prompt_tokens,
            turn=planned.turn,
        )
        self._records.append(record)
        return record

    async def _send(self, planned: PlannedRequest, record: RequestRecord) -> None:
        """Send one request now, and fill its record; a failure stands in it."""
        answer = AnswerReader(record)
        self._running[id(record)] = record
        self._max_running = max(self._max_running, len(self._running))
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.request(self._path, answer.take, body=planned.body)
            answer.finish(response)
        except TimeoutError:
            record.fail(RequestFailedError("timeout", f"no complete answer within {self._timeout_s:g} s"))
        except RequestFailedError as error:
            record.fail(error)
        finally:
            del self._running[id(record)]
            self._num_ended_tokens += record.num_asked_tokens
            record.end_ns = now_ns()
