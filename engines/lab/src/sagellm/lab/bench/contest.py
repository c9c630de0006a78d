"""The same load on one server after the other: what each reaches, and how it treats urgent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from sagellm.engines.metrics.latency import ttft_s
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.figures import ErrorCount, ServeFigures, Spread, serve_figures, spread
from sagellm.lab.bench.http_client import HTTPClient
from sagellm.lab.bench.readings import KVUse, Reading, ServerWatch, kv_use, reader_of
from sagellm.lab.bench.roofline import Limits as MachineLimits, RooflineFigures, roofline_figures
from sagellm.lab.bench.served_model import find_model
from sagellm.lab.bench.sessions import Phase, SessionDriver, SessionRun
from sagellm.lab.bench.watch import ClientLoad, ClientWatch
from sagellm.lab.bench.workloads import HIGH_PRIORITY, WorkloadSettings, make_sessions

if TYPE_CHECKING:
    from sagellm.engines.worker.work import WorkMetrics
    from sagellm.lab.bench.contenders import Contender
    from sagellm.lab.bench.figures import Limits

_WARM_UP_REQUESTS = 2
_WARM_UP_SEED = -1


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

    def run(self, contender: Contender, phase: Phase) -> tuple[PhaseFigures, SessionRun]:
        """Apply a phase. Raises BenchmarkError if the server is not there, or every request fails."""
        return asyncio.run(self._run(contender, phase))

    async def _run(self, contender: Contender, phase: Phase) -> tuple[PhaseFigures, SessionRun]:
        client = HTTPClient(contender.url)
        reader = reader_of(contender)
        try:
            model = await find_model(client, None)
            driver = SessionDriver(client, model.name, has_priorities=self._has_priorities)
            await self._warm_up(driver, contender.name)
            sessions = make_sessions(replace(self._workload, seed=self._workload.seed + phase.seed))
            async with ServerWatch(reader) as watch, ClientWatch() as own:
                run = await driver.run(sessions, phase)
        finally:
            client.close()
            reader.close()
        figures = serve_figures(run.load_run(), self._goodput)
        _check(contender.name, figures.num_succeeded, figures.errors)
        num_events = sum(len(record.event_times_ns) for record in run.records)
        return self._figures(contender, run, figures, watch.readings, own.load(num_events)), run

    async def _warm_up(self, driver: SessionDriver, name: str) -> None:
        sessions = make_sessions(replace(self._workload, seed=self._workload.seed + _WARM_UP_SEED))
        one_turn = (replace(session, turns=session.turns[:1]) for session in sessions)
        run = await driver.run(islice(one_turn, _WARM_UP_REQUESTS), Phase(duration_s=600.0))
        failed = serve_figures(run.load_run())
        if failed.num_failed:
            _check(name, 0, failed.errors)

    def _figures(
        self,
        contender: Contender,
        run: SessionRun,
        figures: ServeFigures,
        readings: Sequence[Reading],
        client: ClientLoad,
    ) -> PhaseFigures:
        ideal = ideal_hit_rate(run)
        before, after = readings[0].work, readings[-1].work
        work = None if before is None or after is None else after - before
        hit_rate = figures.token_hit_rate
        kinds = sorted({session.kind for session, _ in run.sent})
        return PhaseFigures(
            load=figures,
            high_priority=_class_figures(
                run, {n for n, (one, _) in enumerate(run.sent) if one.priority >= HIGH_PRIORITY}
            ),
            kinds={
                kind: _class_figures(run, {n for n, (one, _) in enumerate(run.sent) if one.kind == kind})
                for kind in kinds
            },
            token_hit_rate=hit_rate,
            token_saving=_token_saving(run, figures, work),
            ideal_hit_rate=ideal,
            share_of_ideal=hit_rate / ideal if hit_rate is not None and ideal else None,
            kv=kv_use(readings),
            peak_rss_mib=contender.peak_rss_mib(),
            work=work,
            client=client,
        )


def ideal_hit_rate(run: SessionRun) -> float:
    """Return what of these prompts, in this order, a cache without limit would have had."""
    from sagellm.lab.simulation.bounds import count_known_tokens

    trace = run.trace()
    total = sum(one.num_prompt_tokens for one in trace)
    return sum(count_known_tokens(trace)) / total if total else 0.0


def _token_saving(run: SessionRun, figures: ServeFigures, work: WorkMetrics | None) -> float | None:
    """Return the share of prompt tokens that were not computed; None if the engine counts no work."""
    if work is None or not figures.num_prompt_tokens:
        return None
    num_decoded = sum(record.num_output_tokens - 1 for record in run.records if record.is_ok)
    return 1 - (work.num_tokens - num_decoded) / figures.num_prompt_tokens


def _class_figures(run: SessionRun, numbers: set[int]) -> ClassFigures:
    records = [record for number, record in enumerate(run.records) if number in numbers]
    good = [record for record in records if record.is_ok]
    return ClassFigures(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        ttft_ms=_spread_ms(ttft_s(one.arrival_ns, one.times.first_token_ns) for one in good),
        e2e_ms=_spread_ms((one.end_ns - one.arrival_ns) / 1e9 for one in good),
    )


def _spread_ms(values_s: Iterable[float]) -> Spread | None:
    return spread(value * 1e3 for value in values_s)


def _check(name: str, num_succeeded: int, errors: dict[str, ErrorCount]) -> None:
    for kind, error in errors.items():
        if not num_succeeded:
            raise BenchmarkError(f"{name}: {error.count} requests failed; {kind}: {error.example}")
