"""`engine status`: the engines that run, and how busy they are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from sagellm.core import EngineDeadError, EngineError, KVPoolMetrics, PrefixCacheMetrics
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.engine_core.pass_failures import pass_failures
from sagellm.server.cli.figures import write_duration
from sagellm.server.cli.running import EngineArgument, EngineName, find_engine
from sagellm.server.remote import AdminClient, RunningEngine

_HEAD = ("NAME", "STATE", "MODEL", "URL", "PID", "UPTIME", "RUNNING", "WAITING", "KV USED")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """One engine. Unknown values are None; `error` says why."""

    name: str
    state: str  # "starting", "ready", "draining"; "busy" does not answer in time; "down" has no core
    model: str
    url: str
    pid: int
    uptime_s: float
    num_running: int | None = None
    num_waiting: int | None = None
    num_blocks: int | None = None
    num_held_blocks: int | None = None
    eviction_failure: str = ""  # why last use replaced the eviction policy, if it did
    pass_failures: dict[str, str] = field(default_factory=dict)  # why scheduler passes were removed
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_failure: str = ""  # why the draft proposer is not asked any more, if so
    error: str | None = None


@app.command()
def status(
    name: EngineArgument = None,
    *,
    engine: EngineName = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for an engine's answer.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the engines that run, or one, and how busy they are."""
    for dead in RunningEngine.withdraw_dead():
        log = f"; its log is {dead.log}" if dead.log.exists() else ""
        typer.echo(f"{dead.name} (process {dead.pid}) ended unexpectedly{log}", err=True)
    engines = RunningEngine.all() if (name, engine) == (None, None) else [find_engine(name, engine)]
    found = read_all(engines, timeout_s=timeout)
    if as_json:
        print_json({"engines": found})
    elif not found:
        typer.echo("no engine runs; start one with: sage llm engine start")
    else:
        typer.echo(columns(_HEAD, [_row(each) for each in found]))
        for each in found:
            for line in _failures(each):
                typer.echo(f"{each.name}: {line}", err=True)


def _failures(each: EngineStatus) -> Iterator[str]:
    if each.error is not None:
        yield each.error
    if each.eviction_failure:
        told = "the least recently used goes first since the eviction policy failed"
        yield f"{told}: {each.eviction_failure}"
    for failed, why in each.pass_failures.items():
        yield f"the scheduler pass {failed} failed and was removed: {why}"
    if each.draft_failure:
        yield f"there are no drafts any more: {each.draft_failure}"


def read_all(engines: list[RunningEngine], *, timeout_s: float) -> list[EngineStatus]:
    """Ask the engines at once, so that a hanging one does not delay the others."""
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(engines)))) as pool:
        return list(pool.map(lambda engine: read_status(engine, timeout_s=timeout_s), engines))


def read_status(engine: RunningEngine, *, timeout_s: float) -> EngineStatus:
    """Ask one engine for its status."""
    found = EngineStatus(
        name=engine.name,
        state=engine.state,
        model=engine.model,
        url=engine.url,
        pid=engine.pid,
        uptime_s=engine.uptime_s,
    )
    try:
        with AdminClient.connect(engine.socket, timeout_s=timeout_s) as client:
            metrics = client.metrics()
    except EngineError as error:
        if engine.state == "starting":
            return found
        state = "down" if isinstance(error, EngineDeadError) else "busy"
        return replace(found, state=state, error=str(error))
    drafts = metrics.modules.get("speculation")
    cache, pool = metrics.modules.get("prefix_cache"), metrics.modules.get("kv_pool")
    return replace(
        found,
        num_running=metrics.num_running,
        num_waiting=metrics.num_waiting,
        num_blocks=pool.total_blocks if isinstance(pool, KVPoolMetrics) else None,
        num_held_blocks=metrics.num_held_blocks if isinstance(pool, KVPoolMetrics) else None,
        eviction_failure=cache.policy_failure if isinstance(cache, PrefixCacheMetrics) else "",
        pass_failures=pass_failures(metrics),
        num_draft_tokens=getattr(drafts, "num_draft_tokens", 0),
        num_accepted_tokens=getattr(drafts, "num_accepted_tokens", 0),
        draft_failure=getattr(drafts, "failure", ""),
    )


def _row(each: EngineStatus) -> tuple[str, ...]:
    used = "-" if not each.num_blocks else f"{(each.num_held_blocks or 0) / each.num_blocks:.0%}"
    counts = ("-" if count is None else str(count) for count in (each.num_running, each.num_waiting))
    uptime = write_duration(each.uptime_s)
    return (each.name, each.state, each.model, each.url, str(each.pid), uptime, *counts, used)
