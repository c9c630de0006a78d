"""`simulate`: a trace through the modules that serve, without a model: the cache alone, or all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.core.plugins.option_text import split
from sagellm.engines.cli.engine_flags import ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.names import complete_providers
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.engines.config.sources import load_config
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.flags import AsJSON, find_trace, flag
from sagellm.lab.cli.serving_flags import SERVING_FLAGS, TRACE_FLAGS, with_block_size
from sagellm.lab.cli.simulate_faults import FAULT_FLAGS, simulate_faults
from sagellm.lab.cli.simulate_serving import ORACLE_FLAG, ServingTargets, simulate_serving
from sagellm.lab.files import write_json_lines
from sagellm.lab.plots import check_plot

if TYPE_CHECKING:
    from sagellm.core import TraceRequest
    from sagellm.lab.simulation.runs import CacheRun, Simulation

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HEAD = ("POLICY", "CAPACITY", "SAVED", "GAP CLOSED", "SHARED", "PER REQUEST", "RE-PREFILL", "USED")


SIMULATE_FLAGS = (
    flag("capacity", list[str], "LIST", "Blocks of KV: 1000,5000,10000."),
    flag(
        "eviction_policy",
        list[str],
        "LIST",
        "Policies: lru,qos{within=reuse}; belady is the optimum, off disables caching.",
        autocompletion=complete_providers("eviction_policy"),
    ),
    *TRACE_FLAGS,
    flag("plot", Path, "FILE", "Draw what is saved and shared (PNG, SVG, …)."),
    flag("requests", Path, "FILE", "Write what became of each request (JSON lines)."),
    *SERVING_FLAGS,
    ORACLE_FLAG,
    *FAULT_FLAGS,
)


@app.command()
@with_flags(SIMULATE_FLAGS)
def simulate(  # noqa: PLR0913
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE", help="The trace to read, or a recording's name.", callback=find_trace
        ),
    ] = None,
    *,
    faults: Annotated[bool, typer.Option("--faults", help="Simulate a server with faults instead.")] = False,
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="Replay through the cache alone; the default without --cost.")
    ] = False,
    bounds: Annotated[bool, typer.Option(help="Also replay LRU and the optimum, without --cost.")] = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Simulate a trace: with --cost on virtual time through all that serves, else the prefix cache alone.

    With --cost, requests arrive, wait, run and are preempted; each step takes what the file says, and the
    scheduler, its passes, KV pool, cache and tiers are those that serve. Without, no request runs beside
    another: what is saved depends on the cache, the pool and the eviction policy alone.

    With --faults, no trace: a whole server runs on virtual time, with clients and faults from seeds.
    """
    if faults:
        simulate_faults(options, as_json=as_json)
        return
    if trace is None:
        raise ConfigError("which load is replayed? Name a trace, or simulate a server's faults with --faults")
    plot, requests_file = options.get("plot"), options.get("requests")
    check_plot(plot)
    check_targets(plot, requests_file, overwrite=overwrite, source=trace)
    if "cost" not in options:
        for name in ("scheduler_passes", "stretch", "oracle"):
            if name in options:
                flag = "passes" if name == "scheduler_passes" else name
                raise ConfigError(
                    f"--{flag} is for serving, which is simulated with --cost FILE; give that too"
                )
        _replay(trace, options, bounds=bounds, as_json=as_json, config=config)
        return
    if cache_only or "capacity" in options:
        raise ConfigError(
            "--cost simulates serving, and --cache-only and --capacity replay the cache alone; choose one "
            "(blocks of KV in serving are --num-blocks)"
        )
    from sagellm.lab.traces import read_trace

    requests = read_trace(trace, name=options.get("reader"), limit=options.get("limit"))
    targets = ServingTargets(plot, requests_file, as_json)
    simulate_serving(trace, requests, options, targets, config)


def _replay(
    trace: Path, options: Mapping[str, Any], *, bounds: bool, as_json: bool, config: Path | None
) -> None:
    from sagellm.lab.simulation.runs import simulate as run, with_bounds
    from sagellm.lab.traces import read_trace

    plot, requests_file = options.get("plot"), options.get("requests")
    policies = _split(options.get("eviction_policy") or [])
    flags = {name: options[name] for name in ("prefix_cache",) if name in options}
    settings = load_config(flags, config_file=config).config
    capacities = [_blocks(text) for text in _split(options.get("capacity") or [])]
    if not capacities:
        raise ConfigError(
            "how many blocks of KV are there? Say so with --capacity 1000,5000, or simulate serving with "
            "--cost FILE"
        )
    policies = policies or [settings.prefix_cache.eviction_policy.name]
    if bounds:
        policies = with_bounds(policies)
    requests = read_trace(trace, name=options.get("reader"), limit=options.get("limit"))
    settings = with_block_size(settings, requests, options.get("block_size"))
    total = len(requests) * (1 + len(capacities) * len(policies))
    started = time.perf_counter()
    with progress_bar("replaying", total=total, unit="requests") as advance:
        found = run(requests, settings, capacities=capacities, policies=policies, advance=advance)
    elapsed_s = time.perf_counter() - started
    if plot is not None:
        _plot(plot, found, f"{trace.name}: {len(requests):,} requests, blocks of {found.block_size} tokens")
    if requests_file is not None:
        rows = (
            {"eviction_policy": each.eviction_policy, "capacity": each.capacity} | asdict(request)
            for each in found.runs
            for request in each.requests
        )
        write_json_lines(requests_file, rows, "requests")
    if as_json:
        print_json(_as_json(trace, found))
    else:
        typer.echo(_text(requests, found, elapsed_s))


def _split(lists: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for text in lists for name in split(text)))


def _blocks(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ConfigError(f"--capacity is {text!r}; it must be whole numbers of blocks: 1000,5000") from None


def _text(requests: Sequence[TraceRequest], found: Simulation, elapsed_s: float) -> str:
    rows = [_row(run) for run in found.runs]
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    num_refused = max(run.figures.num_refused for run in found.runs)
    lines = [
        f"{len(requests):,} requests, {num_tokens:,} prompt tokens, blocks of {found.block_size}; "
        f"{elapsed_s:.1f} s",
        f"a cache that never evicts saves {found.upper_bound:.2%} of the prompt tokens, "
        f"{found.ideal:.2%} without blocks",
        "",
        columns(_HEAD, rows),
    ]
    if num_refused:
        lines.append(f"\nup to {num_refused:,} prompts found no room and count as not saved")
    return "\n".join(lines)


def _row(run: CacheRun) -> tuple[str, ...]:
    figures = run.figures
    return (
        run.eviction_policy,
        f"{run.capacity:,}",
        f"{figures.token_saving:.2%}",
        "-" if run.gap_closed is None else f"{run.gap_closed:.1%}",
        f"{figures.block_sharing_fraction:.2%}",
        f"{figures.mean_block_sharing_fraction:.2%}",
        f"{figures.re_prefill_rate:.2%}",
        f"{figures.utilisation:.1%}",
    )


def _as_json(trace: Path, found: Simulation) -> dict[str, Any]:
    return {
        "trace": str(trace),
        "block_size": found.block_size,
        "upper_bound": found.upper_bound,
        "ideal": found.ideal,
        "runs": [
            {
                "eviction_policy": run.eviction_policy,
                "capacity": run.capacity,
                "gap_closed": run.gap_closed,
                **asdict(run.figures),
            }
            for run in found.runs
        ],
    }


def _plot(path: Path, found: Simulation, title: str) -> None:
    from sagellm.lab.plots import plot_replays
    from sagellm.lab.simulation.figures import sharing_fractions

    savings: dict[str, list[tuple[int, float]]] = {}
    for run in found.runs:
        savings.setdefault(run.eviction_policy, []).append((run.capacity, run.figures.token_saving))
    largest = max(run.capacity for run in found.runs)
    sharing = {
        run.eviction_policy: sharing_fractions(run.requests) for run in found.runs if run.capacity == largest
    }
    plot_replays(path, title=title, savings=savings, upper_bound=found.upper_bound, sharing=sharing)
