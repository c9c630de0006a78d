"""`trace generate|info|convert|anonymize`: makes load traces, says what is in one, and converts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError, nearest
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.output import new_app, print_json
from sagellm.engines.cli.targets import check_targets
from sagellm.engines.metrics.latency import percentile
from sagellm.engines.progress import Advance, progress_bar
from sagellm.engines.sizes import format_bytes
from sagellm.lab.cli.flags import LENGTHS, AsJSON, Overwrite, Reader, Source, find_trace, flag
from sagellm.server.cli.figures import figures_table

if TYPE_CHECKING:
    from sagellm.core import TraceRequest

app = new_app("Make traces of load, say what is in one, and convert it.")

DEFAULT_BLOCK_TOKENS = 16


def complete_format(incomplete: str) -> list[str]:
    """Complete the name of a format that is written."""
    return [name for name in _writers() if name.startswith(incomplete)]


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


@app.command(epilog=f"LENGTHS are {LENGTHS}.")
@with_flags(GENERATE_FLAGS)
def generate(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The trace to write (JSON lines).")],
    *,
    arrivals: Annotated[
        Path | None,
        typer.Option(metavar="TRACE", help="Take the arrivals from a recorded trace.", callback=find_trace),
    ] = None,
    overwrite: Overwrite = False,
    **options: Any,
) -> None:
    """Simulate clients that converse, and write what they ask as a trace with token ids."""
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


Target = Annotated[Path, typer.Argument(metavar="FILE", help="The trace to write.")]


@app.command(name="show", hidden=True)  # what `info` was named in 0.2
@app.command()
def info(path: Source, *, reader: Reader = None, as_json: AsJSON = False) -> None:
    """Say what is in a trace."""
    from sagellm.lab.traces import read_trace

    figures = figures_of_trace(read_trace(path, name=reader))
    if as_json:
        print_json(figures)
    else:
        typer.echo(figures_table(figures))


@app.command()
def convert(
    source: Source,
    path: Target,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="sagellm, mooncake or azure. [default: azure for .csv, else sagellm]",
            autocompletion=complete_format,
        ),
    ] = None,
    reader: Reader = None,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Write a trace in another format: ours, Mooncake's lines or Azure's CSV.

    What the other format has no field for is lost. Requests without a prompt or an output are left out.
    """
    from sagellm.lab.traces import read_trace

    writers = _writers()
    chosen = to or ("azure" if ".csv" in path.suffixes else "sagellm")
    if chosen not in writers:
        raise ConfigError(
            f"--to is {chosen!r}; it must be one of {', '.join(writers)}.{nearest(chosen, writers)}"
        )
    check_targets(path, overwrite=overwrite, source=source)
    requests = read_trace(source, name=reader)
    with progress_bar("converting", total=len(requests), unit="requests") as advance:
        writers[chosen](path, _counted(requests, advance))
    _say_written(path, requests, chosen, as_json=as_json)


@app.command()
def anonymize(
    source: Source,
    path: Target,
    *,
    block_tokens: Annotated[
        int | None,
        typer.Option(metavar="INT", min=1, help="Tokens in a block. [default: the trace's own, else 16]"),
    ] = None,
    reader: Reader = None,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Replace the tokens of a trace by salted hashes of blocks, and names of tenants and conversations.

    The result replays as the original does, in our format. The salt is kept nowhere.
    """
    from sagellm.lab.traces import read_trace
    from sagellm.lab.traces.sagellm import write_anonymous

    check_targets(path, overwrite=overwrite, source=source)
    requests = read_trace(source, name=reader)
    size = block_tokens or max(one.block_tokens for one in requests) or DEFAULT_BLOCK_TOKENS
    with progress_bar("anonymizing", total=len(requests), unit="requests") as advance:
        write_anonymous(path, _counted(requests, advance), size, {"made_by": "sage llm trace anonymize"})
    _say_written(path, requests, "sagellm", as_json=as_json)


def _writers() -> dict[str, Callable[[Path, Iterable[TraceRequest]], None]]:
    from sagellm.lab.traces import write_trace
    from sagellm.lab.traces.other_formats import write_azure, write_mooncake

    return {"sagellm": write_trace, "mooncake": write_mooncake, "azure": write_azure}


def _counted(requests: list[TraceRequest], advance: Advance) -> Iterator[TraceRequest]:
    for one in requests:
        yield one
        advance(1)


def _say_written(path: Path, requests: list[TraceRequest], name: str, *, as_json: bool) -> None:
    written = {
        "path": str(path),
        "format": name,
        "num_requests": len(requests),
        "num_bytes": path.stat().st_size,
    }
    if as_json:
        print_json(written)
    else:
        typer.echo(f"{path}: {len(requests):,} requests, {format_bytes(path.stat().st_size)}, {name}")


def figures_of_trace(requests: list[TraceRequest]) -> dict[str, Any]:
    """Return the figures of a trace."""
    prompts = [float(one.num_prompt_tokens) for one in requests]
    outputs = [float(one.num_output_tokens) for one in requests]
    first = requests[0]
    content = "blocks" if first.block_ids else "token ids" if len(first.token_ids) else "lengths alone"
    reasons = Counter(one.finish_reason for one in requests if one.finish_reason)
    cached = [one for one in requests if one.num_cached_tokens is not None]
    ttfts = [1e3 * one.ttft_s for one in requests if one.ttft_s is not None]
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
        "num_later_turns": sum((one.turn or 1) > 1 for one in requests) if first.turn else None,
        "finish_reasons": ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common()) or None,
        "cached_prompt_tokens": _share(cached),
        "ttft_ms_p50": percentile(ttfts, 50) if ttfts else None,
        "ttft_ms_p99": percentile(ttfts, 99) if ttfts else None,
    }


def _share(requests: list[TraceRequest]) -> float | None:
    """Return the share of prompt tokens that was cached where the trace was recorded."""
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    return sum(one.num_cached_tokens or 0 for one in requests) / num_tokens if num_tokens else None


def _sentence(requests: list[TraceRequest]) -> str:
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    num_conversations = len({one.conversation for one in requests})
    return f"{len(requests):,} requests of {num_conversations:,} conversations, {num_tokens:,} prompt tokens"
