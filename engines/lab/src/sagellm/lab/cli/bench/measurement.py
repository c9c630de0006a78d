"""What the commands of `bench` share: they measure, print, and keep the result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.engines.cli.engine_flags import ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.lab.cli.flags import AsJSON, flag
from sagellm.lab.cli.variadic import VariadicCommand
from sagellm.lab.plots import check_plot

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.lab.bench.results import Result


def _parameter(name: str, annotation: Any, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_COMPARE = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="A.json B.json…",
        help="Run nothing; print saved results beside each other, with ratios to the first.",
    ),
]
_OUTPUT = (
    flag("save", Path, "FILE", "Write the result to a JSON file."),
    _parameter("overwrite", Overwrite, default=False),
    _parameter("compare", _COMPARE),
    _parameter("as_json", AsJSON, default=False),
)

REQUEST_FLAGS = (
    flag("plot", Path, "FILE", "Draw all requests' times (needs matplotlib)."),
    flag("chrome_trace", Path, "FILE", "Write all requests as a trace that Perfetto opens."),
)
"""For commands whose results have requests."""

CONFIG_FLAG = (_parameter("config", ConfigFile),)


def measurement(
    measure: Callable[[dict[str, Any]], Result], *tables: Sequence[inspect.Parameter]
) -> typer.Typer:
    """Build a command with the flags of the tables; `measure` takes those that the user set."""

    def run(
        *,
        overwrite: Overwrite = False,
        as_json: AsJSON = False,
        **options: Any,
    ) -> None:
        from sagellm.lab.cli.bench.show import print_comparison, print_result

        files = {name: options.pop(name, None) for name in ("save", "plot", "chrome_trace")}
        if compared := options.pop("compare", None):
            print_comparison(compared, as_json=as_json, files=files)
            return
        check_plot(files["plot"])
        check_targets(*files.values(), overwrite=overwrite, source=options.get("trace"))
        result = measure(options)
        print_result(result, as_json=as_json)
        _write(result, **files)

    run.__name__, run.__doc__ = measure.__name__, measure.__doc__
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=VariadicCommand)(with_flags(_OUTPUT, *tables)(run))
    return app


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """Make an engine's configuration of the flags that are left. Raises ConfigError."""
    from sagellm.engines.config.sources import load_config

    config_file = options.pop("config", None)
    return load_config(options, config_file=config_file).config


def _write(result: Result, *, save: Path | None, plot: Path | None, chrome_trace: Path | None) -> None:
    from sagellm.lab.bench.chrome_trace import write_chrome_trace
    from sagellm.lab.bench.results import save_result
    from sagellm.lab.plots import plot_rows

    if plot is not None:
        plot_rows(plot, _runs(result), title=_load(result))
    if chrome_trace is not None:
        write_chrome_trace(chrome_trace, _runs(result))
    if save is not None:
        save_result(result, save)


def _runs(result: Result) -> dict[str, dict[str, list[Any]]]:
    """Return the columns of requests by run."""
    requests = result["requests"]
    return {result["settings"]["model"]: requests} if result["benchmark"] == "serve" else requests


def _load(result: Result) -> str:
    settings = result["settings"]
    if result["benchmark"] == "serve":
        return settings["trace"] or "made prompts"
    return f"{settings['base_url'] or settings['engine']['model.name']}: benchmark"
