"""`bench fit`: what a step costs on this machine, for `simulate --cost`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.model import ModelArgument, with_model
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.lab.cli.bench.measurement import CONFIG_FLAG, engine_config
from sagellm.lab.cli.flags import AsJSON, flag

if TYPE_CHECKING:
    from sagellm.lab.bench.step_fit import FitFigures

_LARGE_ERROR = 0.2

app = typer.Typer(add_completion=False, rich_markup_mode=None)


_FIT = (
    flag("duration_s", float, "SECONDS", "How long to measure. [default: 60]", "--duration"),
    flag("max_seqs", int, "INT", "Most sequences in a step. [default: 256]"),
    flag("max_prompt_tokens", int, "INT", "Longest prompt. [default: 1024]"),
    flag("max_output_tokens", int, "INT", "Longest output. [default: 64]"),
)
_FILES = (
    flag("steps", Path, "FILE", "Run nothing; fit the steps in this file."),
    flag("record", Path, "FILE", "Write the measured steps (JSON lines)."),
    flag("save", Path, "FILE", "Write the costs, for `simulate --cost`."),
)


@app.command()
@with_flags(MODEL_FLAG, _FIT, _FILES, CONFIG_FLAG, ENGINE_FLAGS)
def fit(
    model: ModelArgument = None,
    *,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
    **options: Any,
) -> None:
    """Run steps of all sizes on an engine in this process, and fit what they cost.

    A step is measured whole: planning, computing and recording. The costs are those of this machine, model
    and number format.
    """
    from sagellm.engines.cli.model import say_if_embedded
    from sagellm.lab.bench.step_fit import (
        FitSettings,
        fit_steps,
        measure_steps,
        read_steps,
        write_steps,
    )
    from sagellm.lab.simulation.step_costs import StepCosts, write_step_costs

    steps_file, record, save = (options.pop(name, None) for name in ("steps", "record", "save"))
    own = {one.name: options.pop(one.name) for one in _FIT if one.name in options}
    check_targets(save, record, overwrite=overwrite, source=steps_file)
    config = engine_config(with_model(options, model))
    if steps_file is None:
        settings = FitSettings(**own)
        say_if_embedded(config.model.name)
        steps, costs = measure_steps(config, settings, progress=True)
    elif own or record:
        raise ConfigError("--steps runs nothing, so there is nothing to set or to record; leave the rest out")
    else:
        from sagellm.core import StepCost

        device: Literal["cpu", "cuda"] = "cuda" if config.model.device.startswith("cuda") else "cpu"
        steps = read_steps(steps_file)
        about = {"model": config.model.name, "dtype": config.model.dtype}
        costs = StepCosts(source=str(steps_file), device=device, step=StepCost(base_ns=1.0), about=about)
    if record is not None:
        write_steps(record, steps)
    costs, figures = fit_steps(steps, costs)
    if save is not None:
        write_step_costs(save, costs)
    if as_json:
        print_json(asdict(figures))
    else:
        typer.echo(_text(costs.source, figures))
        if save is not None:
            typer.echo(f"\nwrote the costs to {save}, for `simulate` and `ab` with --cost {save}")
    if figures.median_error > _LARGE_ERROR:
        typer.echo(
            f"Warning: the fit is {figures.median_error:.0%} off in the median step: was the machine busy "
            "with other work? `simulate` and `ab` will be as far off; measure again while nothing else runs",
            err=True,
        )


def _text(source: str, figures: FitFigures) -> str:
    rows = [(name, f"{value:,.3f}") for name, value in figures.step.items()]
    return "\n".join(
        (
            f"{source}: {figures.total_s:.1f} s",
            f"median step error {figures.median_error:.1%} (of steps that were not fitted "
            f"{figures.held_out_median_error:.1%}, together {figures.held_out_total_error:+.1%}), "
            f"90 % of errors below {figures.p90_error:.1%}",
            "",
            columns(("COEFFICIENT", "VALUE"), rows),
        )
    )
