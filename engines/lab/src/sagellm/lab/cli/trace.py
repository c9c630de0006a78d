"""`trace generate|show`: generates load traces, and shows what is in one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.output import new_app, print_json
from sagellm.engines.cli.targets import check_targets
from sagellm.engines.metrics.latency import percentile
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.flags import AsJSON, flag
from sagellm.server.cli.figures import figures_table

if TYPE_CHECKING:
    from sagellm.core import TraceRequest

app = new_app("Make traces of load, and show what is in one.")

GENERATE_FLAGS = (
    flag("num_requests", int, "INT", "Requests. [default: 100]"),
    flag("turns", str, "LENGTHS", "Turns of a conversation; 1 makes single-turn requests. [default: 5]"),
    flag("system_len", int, "INT", "Tokens that all prompts begin with. [default: 0]"),
    flag("user_len", str, "LENGTHS", "Tokens that a client sends in a turn. [default: lognormal:140:0.5]"),
    flag("output_len", str, "LENGTHS", "Tokens of an answer. [default: lognormal:140:0.5]"),
    flag(
        "think_s", str, "LENGTHS", "Seconds between an answer and the next turn. [default: lognormal:60:0.9]"
    ),
    flag("rate", float, "FLOAT", "Conversations that begin per second. [default: 1]"),
    flag("tokens_per_s", float, "FLOAT", "Tokens of an answer per second. [default: 50]"),
    flag("num_tenants", int, "INT", "Tenants that conversations are dealt to. [default: 1]"),
    flag("vocab_size", int, "INT", "Token ids are drawn below this. [default: 4000]"),
    flag("seed", int, "INT", "The same seed makes the same trace. [default: 0]"),
)


@app.command()
@with_flags(GENERATE_FLAGS)
def generate(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The trace to write (JSON lines).")],
    *,
    arrivals: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Take the arrivals from a recorded trace.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", "--force", help="Overwrite FILE if it exists, without asking.")
    ] = False,
    **options: Any,
) -> None:
    """Simulate clients that converse, and write what they ask as a trace with token ids.

    LENGTHS are 512, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA or exponential:MEAN.
    """
    from sagellm.lab.simulation.conversations import ConversationSettings, simulate_clients
    from sagellm.lab.traces import read_trace, write_trace
    from sagellm.lab.traces.lengths import Lengths

    given: dict[str, Any] = {
        name: Lengths.parse(value) if isinstance(value, str) else value for name, value in options.items()
    }
    settings = ConversationSettings(**given)
    check_targets(path, overwrite=overwrite, source=arrivals)
    recorded = None if arrivals is None else [one.arrival_s for one in read_trace(arrivals)]
    with progress_bar("generating", total=settings.num_requests, unit="requests") as advance:
        requests = simulate_clients(settings, recorded, advance)
    about = {field.name: getattr(settings, field.name) for field in fields(settings)}
    write_trace(
        path, requests, {"made_by": "sage llm trace generate", **{k: str(v) for k, v in about.items()}}
    )
    typer.echo(f"{path}: {_sentence(requests)}")


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace to read.")],
    *,
    reader: Annotated[
        str | None, typer.Option(metavar="NAME", help="The trace's reader; else the file shows its format.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Say what is in a trace."""
    from sagellm.lab.traces import read_trace

    figures = figures_of_trace(read_trace(path, name=reader))
    if as_json:
        print_json(figures)
    else:
        typer.echo(figures_table(figures))


def figures_of_trace(requests: list[TraceRequest]) -> dict[str, Any]:
    """Return the figures of a trace."""
    prompts = [float(one.num_prompt_tokens) for one in requests]
    outputs = [float(one.num_output_tokens) for one in requests]
    first = requests[0]
    content = "token ids" if len(first.token_ids) else "blocks" if first.block_ids else "lengths alone"
    return {
        "num_requests": len(requests),
        "duration_s": requests[-1].arrival_s - first.arrival_s,
        "num_prompt_tokens": int(sum(prompts)),
        "num_output_tokens": int(sum(outputs)),
        "prompt_tokens_p50": percentile(prompts, 50),
        "prompt_tokens_p99": percentile(prompts, 99),
        "output_tokens_p50": percentile(outputs, 50),
        "output_tokens_p99": percentile(outputs, 99),
        "content": content,
        "block_tokens": first.block_tokens or None,
        "num_tenants": len({one.tenant for one in requests}),
        "num_conversations": len({one.conversation for one in requests if one.conversation}) or None,
    }


def _sentence(requests: list[TraceRequest]) -> str:
    if not requests:
        raise ConfigError("the trace has no request")
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    num_conversations = len({one.conversation for one in requests})
    return f"{len(requests):,} requests of {num_conversations:,} conversations, {num_tokens:,} prompt tokens"
