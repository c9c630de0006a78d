"""`ab`: configurations on one trace, request by request, with intervals and a verdict."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.engine_flags import ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.names import complete_providers
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.flags import AsJSON, Source, flag
from sagellm.lab.cli.serving_flags import (
    SERVING_FLAGS,
    TRACE_FLAGS,
    read_limits,
    read_load,
    read_settings,
)

if TYPE_CHECKING:
    from sagellm.lab.ab.study import Plan, Study

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_MORE = ("c", "d", "e", "f")


def complete_variant(incomplete: str) -> list[str]:
    """Complete a key of a variant, or the provider that it names."""
    from sagellm.engines.cli.names import beginning
    from sagellm.lab.ab.variants import KINDS, known_keys

    head, comma, last = (
        incomplete.rpartition(",") if "}" in incomplete or "{" not in incomplete else ("",) * 3
    )
    last = last if comma else incomplete
    key, equals, _ = last.partition("=")
    if equals:
        kind = KINDS.get(key.strip())
        return complete_providers(kind)(incomplete) if kind else []
    return [f"{head}{comma}{name}=" for name in beginning(known_keys(), last)]


def _variant(name: str, text: str) -> Any:
    return flag(name, str, "VARIANT", text, f"--{name}", autocompletion=complete_variant)


AB_FLAGS = (
    _variant("a", "What the others are compared with. [default: the configuration as it stands]"),
    _variant("b", "Another one: 'order=mlfq,eviction=lru,scheduler.max_num_seqs=64'."),
    *(_variant(name, "One more.") for name in _MORE),
    flag(
        "eviction_policy",
        list[str],
        "NAME",
        "Of all variants that name none.",
        autocompletion=complete_providers("eviction_policy"),
    ),
    *TRACE_FLAGS,
    flag(
        "headline",
        str,
        "METRIC",
        "What decides: ttft, ttft_p99, tpot, latency, wait, good or saved. [default: ttft; without --cost "
        "saved]",
    ),
    flag("html", Path, "FILE", "Write a report: one page with figures and plots."),
    flag(
        "jobs", int, "INT", "Processes at once. [default: one for each core that the process may use]", min=1
    ),
    *SERVING_FLAGS,
)


@app.command()
@with_flags(AB_FLAGS)
def ab(
    trace: Source,
    *,
    bounds: Annotated[
        bool,
        typer.Option(help="Also run what no real policy has: exact lengths, the optimal eviction; and FCFS."),
    ] = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Compare configurations on a trace: which is better, by how much, and how sure that is.

    A variant is what it changes: eviction=NAME{…}, predictor=NAME{…} (exact knows the lengths), the
    pipeline's order=, share=, preempt= and chunk=, and settings such as scheduler.max_num_seqs=64; default
    changes nothing. With --cost, serving is simulated; without, the prefix cache alone. Requests are compared
    one by one; intervals come from a bootstrap over sessions.
    """
    from sagellm.lab.ab.study import run_study

    html = options.get("html")
    check_targets(html, overwrite=overwrite, source=trace)
    texts = {name: options[name] for name in ("a", "b", *_MORE) if name in options}
    if not texts.keys() - {"a"}:
        raise ConfigError("there is nothing to compare a with; give a variant, such as --b 'order=mlfq'")
    plan = _plan(trace, options, texts, config, bounds=bounds)
    with progress_bar("comparing", total=plan.num_requests_to_run, unit="requests") as advance:
        started = time.perf_counter()
        study = run_study(plan, options.get("jobs") or _num_usable_cores(), advance)
        elapsed_s = time.perf_counter() - started
    if html is not None:
        from sagellm.lab.ab.report import write_report

        write_report(html, study, command=shlex.join(["sage", *sys.argv[1:]]))
    if as_json:
        print_json(study.as_json())
    else:
        typer.echo(_text(study, elapsed_s))


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plan(
    trace: Path, options: Mapping[str, Any], texts: Mapping[str, str], config: Path | None, *, bounds: bool
) -> Plan:
    from sagellm.lab.ab.study import Serving, Source as PlanSource, make_plan
    from sagellm.lab.ab.variants import DEFAULT, read_variant
    from sagellm.lab.simulation.step_costs import read_step_costs
    from sagellm.lab.traces import read_trace

    reader, limit, cost = (options.get(name) for name in ("reader", "limit", "cost"))
    if cost is None:
        for name in ("stretch", "tenant_weights", "max_ttft_s", "max_ttft_prefills", "max_tpot_ms"):
            if name in options:
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"--{flag} is for serving, which is simulated with --cost FILE; give that too"
                )
    requests = read_trace(trace, name=reader, limit=limit)
    settings = read_settings(requests, options, config)
    serving = None
    if cost is not None:
        serving = Serving(
            cost=cost, costs=read_step_costs(cost), load=read_load(options), limits=read_limits(options)
        )
    return make_plan(
        PlanSource(path=trace, requests=requests, reader=reader, limit=limit),
        [read_variant(name, text, settings) for name, text in ({"a": DEFAULT} | dict(texts)).items()],
        serving,
        headline=options.get("headline"),
        with_bounds=bounds,
    )


def _text(study: Study, elapsed_s: float) -> str:
    from sagellm.lab.ab.words import about, about_load, change_rows, figure_rows, notes

    plan = study.plan
    titles = ("RUN", *(metric.title.upper() for metric in plan.metrics))
    lines = [
        about_load(study),
        f"{len(plan.planned) + len(plan.bounds)} runs in {elapsed_s:.1f} s",
        "",
        columns(titles, figure_rows(study)),
        *notes(study),
    ]
    for found, sentence in zip(study.comparisons, study.verdicts, strict=True):
        lines += ["", sentence]
        if not found.is_identical:
            heads = ("METRIC", study.a.name.upper(), found.run.name.upper(), "CHANGE", "95 %")
            lines.append(columns(heads, change_rows(found)))
    return "\n".join([*lines, "", about(study.bootstrap, len(study.comparisons), plan.headline)])
