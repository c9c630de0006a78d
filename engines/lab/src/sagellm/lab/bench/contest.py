"""The same load on one server after the other: what each reaches, and how it treats urgent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from typing import TYPE_CHECKING

from sagellm.core import TraceRequest
from sagellm.engines.metrics.latency import ttft_s
from sagellm.engines.metrics.limits import Limits as MachineLimits
from sagellm.lab.bench.driver import LoadDriver, LoadRun
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.figures import ErrorCount, ServeFigures, Spread, serve_figures, spread_ms
from sagellm.lab.bench.http_client import HTTPClient
from sagellm.lab.bench.readings import KVUse, Reading, ServerWatch, kv_use, reader_of
from sagellm.lab.bench.roofline import RooflineFigures, roofline_figures
from sagellm.lab.bench.served_model import find_model
from sagellm.lab.bench.sessions import Phase
from sagellm.lab.bench.settings import PATHS
from sagellm.lab.bench.watch import ClientLoad, ClientWatch
from sagellm.lab.bench.workloads import (
    HIGH_PRIORITY,
    WORKLOADS,
    Session,
    WorkloadSettings,
    make_sessions,
)

if TYPE_CHECKING:
    from sagellm.engines.worker.work import WorkMetrics
    from sagellm.lab.bench.contenders import Contender
    from sagellm.lab.bench.figures import Limits

_WARM_UP_REQUESTS = 2
_WARM_UP_SEED = -1
_ALONE_REQUESTS = 8
_ALONE_SEED = -2
_ALONE_OUTPUT_TOKENS = 2
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ClassFigures:
    """Requests of one kind of session, or of one class of priority, those that succeeded."""

    num_requests: int
    num_failed: int
    ttft_ms: Spread | None
    e2e_ms: Spread | None


@dataclass(frozen=True, kw_only=True)
class PhaseFigures:
    """What one server did with one phase of the load.

    Token hit rate = prompt tokens whose KV was reused ÷ prompt tokens, as the answers say; `ideal_hit_rate`
    is what a cache without limit and without blocks would reuse of these prompts. Token saving = prefill
    tokens not computed ÷ prompt tokens, by our engine's count of what it computed, recomputation included.
    """

    load: ServeFigures
    high_priority: ClassFigures
    kinds: dict[str, ClassFigures]
    token_hit_rate: float | None
    token_saving: float | None
    ideal_hit_rate: float
    share_of_ideal: float | None
    kv: KVUse
    peak_rss_mib: float | None
    work: WorkMetrics | None  # of our own engine
    client: ClientLoad
    limits: RooflineFigures | None = None  # once the machine's were measured

    def against(self, machine: MachineLimits) -> PhaseFigures:
        """Return the figures with the share of the machine's limits."""
        if self.work is None:
            return self
        return replace(self, limits=roofline_figures(self.work, self.load.duration_s, machine))


class Contest:
    """Applies phases of one load to a server at a time."""

    def __init__(
        self,
        workload: WorkloadSettings,
        *,
        goodput: Limits | None = None,
        has_priorities: bool = True,
    ) -> None:
        self._workload = workload
        self._goodput, self._has_priorities = goodput, has_priorities

    def run(self, contender: Contender, phase: Phase) -> tuple[PhaseFigures, LoadRun]:
        """Apply a phase. Raises BenchmarkError if the server is not there, or every request fails."""
        return asyncio.run(self._run(contender, phase))

    def alone(self, contender: Contender) -> Spread | None:
        """Return the TTFT in ms of first turns of the most urgent kind, one after the other.

        Their prompts share no beginning, so this is what a prompt without any cached KV takes: no order of
        requests gets it sooner. Raises BenchmarkError as `run` does.
        """
        return asyncio.run(self._alone(contender))

    async def _alone(self, contender: Contender) -> Spread | None:
        client = HTTPClient(contender.url)
        try:
            model = await find_model(client, None)
            await self._warm_up(client, model.name, contender.name)
            seeds = range(_ALONE_SEED, _ALONE_SEED - _ALONE_REQUESTS, -1)
            sessions = [self._most_urgent(seed) for seed in seeds]
            return (await self._one_by_one(client, model.name, contender.name, sessions)).ttft_ms
        finally:
            client.close()

    async def _run(self, contender: Contender, phase: Phase) -> tuple[PhaseFigures, LoadRun]:
        client = HTTPClient(contender.url)
        reader = reader_of(contender)
        try:
            model = await find_model(client, None)
            await self._warm_up(client, model.name, contender.name)
            sessions = self._sessions(phase.seed)
            async with ServerWatch(reader) as watch, ClientWatch() as own:
                run = await self._driver(client).run(
                    phase.plan(sessions, model.name, has_priorities=self._has_priorities),
                    concurrency=phase.concurrency,
                    is_closed_loop=phase.rate is None,
                    duration_s=phase.duration_s,
                )
        finally:
            client.close()
            reader.close()
        figures = serve_figures(run, self._goodput)
        _check(contender.name, figures.num_succeeded, figures.errors)
        num_events = sum(len(record.event_times_ns) for record in run.records)
        return self._figures(contender, run, figures, watch.readings, own.load(num_events)), run

    async def _warm_up(self, client: HTTPClient, model: str, name: str) -> None:
        sessions = islice(self._sessions(_WARM_UP_SEED), _WARM_UP_REQUESTS)
        first_turns = [replace(one, turns=one.turns[:1]) for one in sessions]
        await self._one_by_one(client, model, name, first_turns)

    async def _one_by_one(
        self, client: HTTPClient, model: str, name: str, sessions: Sequence[Session]
    ) -> ServeFigures:
        """Send sessions, one after the other. Raises BenchmarkError if a request fails."""
        plan = Phase(duration_s=0).plan(sessions, model, has_priorities=self._has_priorities)
        figures = serve_figures(await self._driver(client).run(plan, concurrency=1, is_closed_loop=True))
        if figures.num_failed:
            _check(name, 0, figures.errors)
        return figures

    def _most_urgent(self, seed: int) -> Session:
        """Return the first session of the most urgent kind, with its first turn and a short answer."""
        highest = max(kind.priority for kind in WORKLOADS[self._workload.name].values())
        session = next(one for one in self._sessions(seed) if one.priority == highest)
        return replace(session, turns=(session.turns[0]._replace(num_output_tokens=_ALONE_OUTPUT_TOKENS),))

    def _driver(self, client: HTTPClient) -> LoadDriver:
        return LoadDriver(client, PATHS["completions"], timeout_s=_TIMEOUT_S)

    def _sessions(self, seed: int) -> Iterator[Session]:
        return make_sessions(replace(self._workload, seed=self._workload.seed + seed))

    def _figures(
        self,
        contender: Contender,
        run: LoadRun,
        figures: ServeFigures,
        readings: Sequence[Reading],
        client: ClientLoad,
    ) -> PhaseFigures:
        ideal = ideal_hit_rate(run)
        before, after = readings[0].work, readings[-1].work
        work = None if before is None or after is None else after - before
        hit_rate = figures.token_hit_rate
        sessions = [session for session, _ in run.sent]
        kinds = sorted({one.kind for one in sessions})
        return PhaseFigures(
            load=figures,
            high_priority=_class_figures(run, [one.priority >= HIGH_PRIORITY for one in sessions]),
            kinds={kind: _class_figures(run, [one.kind == kind for one in sessions]) for kind in kinds},
            token_hit_rate=hit_rate,
            token_saving=_token_saving(run, figures, work),
            ideal_hit_rate=ideal,
            share_of_ideal=hit_rate / ideal if hit_rate is not None and ideal else None,
            kv=kv_use(readings),
            peak_rss_mib=contender.peak_rss_mib(),
            work=work,
            client=client,
        )


def ideal_hit_rate(run: LoadRun) -> float:
    """Return what of these prompts, in this order, a cache without limit would have had."""
    from sagellm.lab.simulation.bounds import count_known_tokens

    trace = [
        TraceRequest(0.0, len(turn.token_ids), turn.num_output_tokens, token_ids=turn.token_ids)
        for _, turn in run.sent
    ]
    total = sum(one.num_prompt_tokens for one in trace)
    return sum(count_known_tokens(trace)) / total if total else 0.0


def _token_saving(run: LoadRun, figures: ServeFigures, work: WorkMetrics | None) -> float | None:
    """Return the share of prompt tokens that were not computed; None if the engine counts no work."""
    if work is None or not figures.num_prompt_tokens:
        return None
    num_decoded = sum(record.num_output_tokens - 1 for record in run.records if record.is_ok)
    return 1 - (work.num_tokens - num_decoded) / figures.num_prompt_tokens


def _class_figures(run: LoadRun, is_in: Sequence[bool]) -> ClassFigures:
    records = list(compress(run.records, is_in))
    good = [record for record in records if record.is_ok]
    return ClassFigures(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        ttft_ms=spread_ms(ttft_s(one.arrival_ns, one.times.first_token_ns) for one in good),
        e2e_ms=spread_ms((one.end_ns - one.arrival_ns) / 1e9 for one in good),
    )


def _check(name: str, num_succeeded: int, errors: dict[str, ErrorCount]) -> None:
    for kind, error in errors.items():
        if not num_succeeded:
            raise BenchmarkError(f"{name}: {error.count} requests failed; {kind}: {error.example}")
