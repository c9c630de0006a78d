"""Applies a load to a server and measures it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from sagellm.engines.progress import Advance, progress_bar
from sagellm.lab.bench.driver import LoadDriver, LoadRun
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.figures import ServeFigures, count_errors, serve_figures
from sagellm.lab.bench.http_client import HTTPClient
from sagellm.lab.bench.plan import plan_load, plan_warmup
from sagellm.lab.bench.served_model import find_model
from sagellm.lab.bench.settings import PATHS, LoadSettings
from sagellm.lab.bench.watch import ClientLoad, ClientWatch

_SHOW_S = 0.5


@dataclass(frozen=True, kw_only=True)
class ServeResult:
    """Figures, what the client cost, what the server said, and the run itself."""

    figures: ServeFigures
    client: ClientLoad
    server: dict[str, Any]
    model: str
    run: LoadRun

    @property
    def warnings(self) -> list[str]:
        """Say what a reader of the figures must know."""
        figures, found = self.figures, self.client.warnings
        if figures.num_failed:
            kinds = ", ".join(f"{one.count} × {kind}" for kind, one in figures.errors.items())
            found.append(
                f"{figures.num_failed} of {figures.num_requests} requests failed ({kinds}); "
                "the figures are those of the others"
            )
        if figures.num_shorter_than_asked:
            found.append(
                f"{figures.num_shorter_than_asked} answers are shorter than requested; compare only runs "
                "whose output lengths are the same"
            )
        if figures.num_without_usage:
            found.append(
                f"{figures.num_without_usage} answers came without usage; their tokens are counted as events"
            )
        if figures.tokens_per_event is not None and abs(figures.tokens_per_event - 1) > 0.05:
            found.append(
                f"an event holds {figures.tokens_per_event:.2f} tokens on average; ITL is the gap "
                "between events"
            )
        return found


def run_serve(settings: LoadSettings, *, progress: bool = False) -> ServeResult:
    """Check the server, warm it up, and apply the load.

    Raises BenchmarkError when there is no server, or the warm-up or every request fails; ConfigError for
    a wrong model or setting.
    """
    return asyncio.run(_serve(settings, progress=progress))


async def _serve(settings: LoadSettings, *, progress: bool) -> ServeResult:
    client = HTTPClient(settings.base_url, api_key=settings.api_key)
    try:
        model = await find_model(client, settings.model)
        plan = plan_load(settings, model.name)
        await _warm_up(settings, client, model.name)
        driver = LoadDriver(client, PATHS[settings.endpoint], timeout_s=settings.timeout_s)
        total = sum(one.num_asked_tokens for one in plan)
        with progress_bar("measuring", total=total, unit="tokens", enabled=progress) as advance:
            showing = asyncio.create_task(_show(driver, advance))
            async with ClientWatch() as watch:
                run = await driver.run(
                    ([one] for one in plan),
                    concurrency=settings.concurrency,
                    is_closed_loop=settings.is_closed_loop,
                )
            showing.cancel()
    finally:
        client.close()
    figures = serve_figures(run, settings.goodput)
    if not figures.num_succeeded:
        kind, first = next(iter(figures.errors.items()))
        raise BenchmarkError(f"all {figures.num_requests} requests failed; {kind}: {first.example}")
    num_events = sum(len(record.event_times_ns) for record in run.records)
    return ServeResult(
        figures=figures, client=watch.load(num_events), server=model.facts, model=model.name, run=run
    )


async def _show(driver: LoadDriver, advance: Advance) -> None:
    """Update the progress now and then; doing so at every event would distort the measurement."""
    num_shown = 0
    while True:
        await asyncio.sleep(_SHOW_S)
        num_tokens = driver.num_tokens
        advance(num_tokens - num_shown)
        num_shown = num_tokens


async def _warm_up(settings: LoadSettings, client: HTTPClient, model: str) -> None:
    driver = LoadDriver(client, PATHS[settings.endpoint], timeout_s=settings.timeout_s)
    plan = ([one] for one in plan_warmup(settings, model))
    run = await driver.run(plan, concurrency=settings.concurrency, is_closed_loop=True)
    for kind, errors in count_errors(run.records).items():
        raise BenchmarkError(
            f"{errors.count} of {settings.warmup} warm-up requests failed; {kind}: {errors.example}"
        )
