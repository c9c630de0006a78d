"""Sends planned requests: at their times, or each when the previous one is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from sagellm.lab.bench.answer import AnswerReader
from sagellm.lab.bench.http_client import HTTPClient
from sagellm.lab.bench.records import RequestFailedError, RequestRecord, now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request whose body is ready, so that only sending it is left to do under load."""

    due_s: float  # after the start; ignored in a closed loop
    body: bytes
    num_prompt_tokens: int
    num_asked_tokens: int


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """What was sent and received between two moments, in the order of the plan."""

    records: list[RequestRecord]
    start_ns: int
    end_ns: int
    max_running: int
    late_s: list[float]  # how late each request was started; empty in a closed loop


class LoadDriver:
    """Sends requests to one path of a server and reads their answers in this event loop."""

    def __init__(self, client: HTTPClient, path: str, *, timeout_s: float) -> None:
        self._client = client
        self._path = path
        self._timeout_s = timeout_s
        self._running: dict[int, RequestRecord] = {}
        self._max_running = 0
        self._num_ended_tokens = 0
        self._late_s: list[float] = []

    async def run(
        self,
        plan: Sequence[PlannedRequest],
        *,
        concurrency: int | None,
        is_closed_loop: bool,
    ) -> LoadRun:
        """Send all and wait for all answers. `concurrency` limits how many run at once.

        In a closed loop, that many callers each send their next request when the last one is answered;
        otherwise requests start at their times, and those waiting for a slot count as arrived.
        """
        records = [
            RequestRecord(
                arrival_ns=0, num_asked_tokens=one.num_asked_tokens, num_prompt_tokens=one.num_prompt_tokens
            )
            for one in plan
        ]
        pairs = list(zip(plan, records, strict=True))
        start_ns = now_ns()
        if is_closed_loop:
            queue = iter(pairs)
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency or 1):
                    group.create_task(self._work_off(queue))
        else:
            await self._send_in_time(pairs, concurrency)
        return LoadRun(
            records=records,
            start_ns=start_ns,
            end_ns=max((record.end_ns for record in records), default=start_ns),
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

    async def send(self, planned: PlannedRequest, record: RequestRecord) -> None:
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

    @property
    def max_running(self) -> int:
        """The most requests that have run at once."""
        return self._max_running

    async def _work_off(self, queue: Iterable[tuple[PlannedRequest, RequestRecord]]) -> None:
        for planned, record in queue:
            record.arrival_ns = now_ns()
            await self.send(planned, record)

    async def _send_in_time(
        self, pairs: list[tuple[PlannedRequest, RequestRecord]], concurrency: int | None
    ) -> None:
        places = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
        start_ns = now_ns()

        async def one(planned: PlannedRequest, record: RequestRecord) -> None:
            async with places:
                await self.send(planned, record)

        async with asyncio.TaskGroup() as group:
            for planned, record in pairs:
                wait_s = planned.due_s - (now_ns() - start_ns) / 1e9
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                record.arrival_ns = now_ns()
                self._late_s.append((record.arrival_ns - start_ns) / 1e9 - planned.due_s)
                group.create_task(one(planned, record))
