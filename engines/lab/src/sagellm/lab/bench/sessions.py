"""Applies sessions to a server for a time: so many callers at once, or sessions that begin at a rate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from sagellm.core import TraceRequest
from sagellm.lab.bench.driver import LoadDriver, LoadRun, PlannedRequest
from sagellm.lab.bench.http_client import HTTPClient
from sagellm.lab.bench.records import RequestRecord, now_ns
from sagellm.lab.bench.workloads import Session, Turn
from sagellm.lab.traces.arrivals import arrival_times

_PATH = "/completions"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How sessions are applied: `concurrency` callers without pauses, or `rate` sessions per second.

    No request starts after `duration_s`; those that run then are waited for.
    """

    duration_s: float
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0


@dataclass(kw_only=True)
class SessionRun:
    """What was sent, in order of arrival: records, and for each one its session and turn."""

    records: list[RequestRecord] = field(default_factory=list)
    sent: list[tuple[Session, Turn]] = field(default_factory=list)
    start_ns: int = 0
    max_running: int = 0

    def load_run(self) -> LoadRun:
        """Return it in the form that figures are computed from."""
        return LoadRun(
            records=self.records,
            start_ns=self.start_ns,
            end_ns=max((one.end_ns for one in self.records), default=self.start_ns),
            max_running=self.max_running,
            late_s=[],
        )

    def trace(self) -> list[TraceRequest]:
        """Return the prompts that were sent as a trace, to replay through a cache without limit."""
        return [
            TraceRequest(
                (record.arrival_ns - self.start_ns) / 1e9,
                len(turn.token_ids),
                turn.num_output_tokens,
                token_ids=turn.token_ids,
            )
            for record, (_, turn) in zip(self.records, self.sent, strict=True)
        ]


class SessionDriver:
    """Sends sessions to one server; with `has_priorities` it is told which ones are urgent."""

    def __init__(
        self, client: HTTPClient, model: str, *, timeout_s: float = 600.0, has_priorities: bool = True
    ) -> None:
        self._driver = LoadDriver(client, _PATH, timeout_s=timeout_s)
        self._model, self._has_priorities = model, has_priorities
        self._until_ns = 0
        self._run = SessionRun()

    async def run(self, sessions: Iterator[Session], phase: Phase) -> SessionRun:
        """Apply sessions until the phase is over, and wait for the last answers."""
        self._run = SessionRun(start_ns=now_ns())
        self._until_ns = self._run.start_ns + int(phase.duration_s * 1e9)
        if phase.rate is None:
            async with asyncio.TaskGroup() as group:
                for _ in range(phase.concurrency or 1):
                    group.create_task(self._call(sessions))
        else:
            await self._begin_at_rate(sessions, phase.rate, phase.seed)
        self._run.max_running = self._driver.max_running
        return self._run

    async def _call(self, sessions: Iterator[Session]) -> None:
        for session in sessions:  # shared by all callers
            for turn in session.turns:
                if now_ns() >= self._until_ns:
                    return
                await self._send(session, turn)

    async def _begin_at_rate(self, sessions: Iterator[Session], rate: float, seed: int) -> None:
        async def converse(session: Session) -> None:
            for turn in session.turns:
                await asyncio.sleep(turn.think_s)
                if now_ns() >= self._until_ns:
                    return
                await self._send(session, turn)

        async with asyncio.TaskGroup() as group:
            for moment_s, session in zip(arrival_times(rate, 1.0, seed), sessions, strict=False):
                wait_s = moment_s - (now_ns() - self._run.start_ns) / 1e9
                await asyncio.sleep(max(0.0, min(wait_s, self._left_s)))
                if not self._left_s:
                    return
                group.create_task(converse(session))

    @property
    def _left_s(self) -> float:
        return max(0.0, (self._until_ns - now_ns()) / 1e9)

    async def _send(self, session: Session, turn: Turn) -> None:
        num_prompt_tokens = len(turn.token_ids)
        planned = PlannedRequest(
            due_s=0.0,
            body=self._body(session, turn),
            num_prompt_tokens=num_prompt_tokens,
            num_asked_tokens=turn.num_output_tokens,
        )
        record = RequestRecord(
            arrival_ns=now_ns(),
            num_asked_tokens=turn.num_output_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )
        self._run.records.append(record)
        self._run.sent.append((session, turn))
        await self._driver.send(planned, record)

    def _body(self, session: Session, turn: Turn) -> bytes:
        body = {
            "model": self._model,
            "prompt": turn.token_ids.tolist(),
            "max_tokens": turn.num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # random weights make tokens without text, whose time counts too
        }
        if self._has_priorities and session.priority:
            body["priority"] = -session.priority  # vLLM's field: smaller is sooner
        return json.dumps(body, separators=(",", ":")).encode()
