"""The `bench` group; each of its commands is imported when called."""

from __future__ import annotations

import typer

from sagellm.engines.cli.lazy import Entry, LazyGroup

_HERE = "sagellm.lab.cli.bench"


class BenchGroup(LazyGroup):
    """The commands of `sage llm bench`."""

    table = {  # noqa: RUF012  (typed in the base)
        "serve": Entry(f"{_HERE}.serve:app", "Send load to an OpenAI-compatible server."),
        "peers": Entry(f"{_HERE}.peers:app", "Send a named load to an engine of its own and to peers."),
        "throughput": Entry(
            f"{_HERE}.offline:throughput", "Run many prompts through an engine in this process."
        ),
        "latency": Entry(f"{_HERE}.offline:latency", "Time one batch in an engine in this process."),
        "startup": Entry(f"{_HERE}.offline:startup", "Start an engine in fresh processes, and time it."),
        "fit": Entry(f"{_HERE}.fit:app", "Fit what steps cost here, for `simulate --cost`."),
    }


app = typer.Typer(cls=BenchGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure servers and engines: throughput and latency."""
