"""`bench serve`: measures any OpenAI-compatible server."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from sagellm.core import ConfigError, nearest
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.engines.cli.variadic import VariadicCommand
from sagellm.lab.bench.settings import Endpoint, LoadSettings, PromptForm
from sagellm.lab.cli.bench.flags import SERVE_FLAGS, AsJSON, Compare, Save, parse_goodput
from sagellm.lab.plots import check_plot
from sagellm.lab.traces.lengths import Lengths

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=VariadicCommand)
@with_flags(SERVE_FLAGS)
def serve(
    *,
    save: Save = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw all requests' times (needs matplotlib).")
    ] = None,
    chrome_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all requests as a trace that Perfetto opens."),
    ] = None,
    overwrite: Overwrite = False,
    compare: Compare = None,
    as_json: AsJSON = False,
    **options: Any,
) -> None:
    """Put load on an OpenAI-compatible server of any make, and measure its streamed answers.

    TTFT counts from a request's arrival to the first bytes with something visible, TPOT the time
    after them by further token, as the server counts tokens.
    """
    from sagellm.lab.cli.bench.show import print_comparison, print_serve_result

    if compare:
        print_comparison(compare, as_json=as_json, save=save, plot=plot)
        return
    settings = load_settings(options)
    from sagellm.lab.bench.chrome_trace import write_chrome_trace
    from sagellm.lab.bench.plot import plot_rows
    from sagellm.lab.bench.results import make_result, request_rows, save_result
    from sagellm.lab.bench.serve import run_serve

    check_plot(plot)
    check_targets(save, plot, chrome_trace, overwrite=overwrite, source=settings.trace)
    measured = run_serve(settings, progress=True)
    result = make_result(
        "serve",
        settings.shown() | {"model": measured.model},
        measured.figures,
        client=measured.client,
        server=measured.server,
        warnings=measured.warnings,
    )
    print_serve_result(result, as_json=as_json)
    result["requests"] = request_rows(measured.run)
    if save is not None:
        save_result(result, save)
    if plot is not None:
        load = settings.trace.name if settings.trace else "made prompts"
        plot_rows({"": result["requests"]}, plot, title=f"{measured.model}: {load}")
    if chrome_trace is not None:
        write_chrome_trace(chrome_trace, {measured.model: result["requests"]})


def load_settings(options: dict[str, Any]) -> LoadSettings:
    """Read what arrives as text. Raises ConfigError."""
    read: dict[str, Any] = {
        "input_len": Lengths.parse,
        "output_len": Lengths.parse,
        "goodput": parse_goodput,
        "rate": lambda value: None if value == inf else value,
        "extra_body": _parse_object,
        "endpoint": lambda value: _choice("--endpoint", value, get_args(Endpoint)),
        "prompt_form": lambda value: _choice("--prompt-form", value, get_args(PromptForm)),
    }
    return LoadSettings(**{name: read.get(name, _as_is)(value) for name, value in options.items()})


def _as_is(value: Any) -> Any:
    return value


def _choice(flag: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{flag} is {value!r}; it must be {' or '.join(choices)}.{nearest(value, choices)}")
    return value


def _parse_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body is {text!r}; it must be a JSON object")
    return found
