"""`simulate --faults`: the whole served system on virtual time, from seeds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.output import print_json
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.flags import flag

FAULT_FLAGS = (
    flag("seeds", int, "INT", "With --faults: run this many seeds; default 100.", min=1),
    flag("first", int, "INT", "With --faults: the first seed; default 0.", min=0),
    flag("only", str, "LIST", "With --faults: only these events of the seed's: 3,7,12."),
)
"""Flags that `--faults` reads besides `--json`."""


def simulate_faults(options: Mapping[str, Any], *, as_json: bool) -> None:
    """Run seeds; print each violation with the events that suffice for it, and exit with 1 if any."""
    from sagellm.lab.simulation.served.seeds import Totals, run_seeds

    first, count = options.get("first") or 0, options.get("seeds") or 100
    only, totals, failures = _numbers(options.get("only")), Totals(), []
    started_s = time.perf_counter()
    with progress_bar("simulating", total=count, unit="seeds") as advance:
        for failure in run_seeds(range(first, first + count), totals, only=only, advance=advance):
            failures.append(failure)
            if not as_json:
                typer.echo(failure)
    elapsed_s = time.perf_counter() - started_s
    if as_json:
        violations = [
            {
                "seed": failure.seed,
                **asdict(failure.violation),
                "command": failure.command,
                "events": [str(event) for event in failure.plan.events],
            }
            for failure in failures
        ]
        print_json({"first_seed": first, **asdict(totals), "elapsed_s": elapsed_s, "violations": violations})
    else:
        typer.echo(
            f"{totals.num_seeds:,} seeds, {totals.num_attempts:,} requests sent, {totals.num_answered:,} "
            f"answered, {totals.num_restarts:,} restarts, {totals.virtual_s / 3600:.1f} h of virtual time in "
            f"{elapsed_s:.0f} s: {len(failures)} violations"
        )
    if failures:
        raise typer.Exit(1)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [] if text == "none" else [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--only is {text!r}; it must be numbers of events: 3,7,12, or none") from None
