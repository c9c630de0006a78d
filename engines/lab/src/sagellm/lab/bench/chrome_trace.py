"""Writes a load as a trace in Chrome's format, which Perfetto opens: a span for each request, by server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sagellm.lab.files import write_json

Rows = Mapping[str, list[Any]]
"""Requests as columns, as a result keeps them: times in milliseconds after the start of the run."""


def write_chrome_trace(path: Path, runs: Mapping[str, Rows]) -> None:
    """Write the requests of each run: a process for each run, a thread for each place that requests take.

    A request is a span from its arrival to its end, with what it waited for its first token inside. Raises
    ConfigError if the file cannot be written.
    """
    events = [
        event for number, (name, rows) in enumerate(runs.items(), 1) for event in _events(number, name, rows)
    ]
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"}, "trace", indent=None)


def _events(process: int, name: str, rows: Rows) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    free_at_ms: list[float] = []  # by place: when its last request ended
    arrivals = sorted(range(len(rows["arrival_ms"])), key=lambda index: rows["arrival_ms"][index])
    for index in arrivals:
        arrival_ms, end_ms = rows["arrival_ms"][index], rows["end_ms"][index]
        place = next((one for one, free in enumerate(free_at_ms) if free <= arrival_ms), len(free_at_ms))
        free_at_ms[place : place + 1] = [end_ms]
        where = {"pid": process, "tid": place + 1, "cat": "request"}
        about = {key: column[index] for key, column in rows.items() if not key.endswith("_ms")}
        yield _span("request", arrival_ms, end_ms, where, {"index": index, **about})
        first_ms = rows["first_token_ms"][index]
        if first_ms is not None:
            yield _span("first token", arrival_ms, first_ms, where, {})


def _span(
    name: str, start_ms: float, end_ms: float, where: Mapping[str, Any], args: Mapping[str, Any]
) -> dict[str, Any]:
    microseconds = {"ts": start_ms * 1e3, "dur": max(0.0, end_ms - start_ms) * 1e3}
    return {"ph": "X", "name": name, **where, **microseconds, "args": dict(args)}
