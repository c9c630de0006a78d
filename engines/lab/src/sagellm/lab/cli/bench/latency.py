"""`bench latency`: how long an engine in this process takes for one batch."""

from __future__ import annotations

from typing import Any

import typer

from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.engines.cli.variadic import VariadicCommand
from sagellm.lab.cli.bench.flags import LATENCY_FLAGS, AsJSON, Compare, Save, latency_options

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=VariadicCommand)
@with_flags(MODEL_FLAG, LATENCY_FLAGS, ENGINE_FLAGS)
def latency(
    *,
    save: Save = None,
    overwrite: Overwrite = False,
    compare: Compare = None,
    as_json: AsJSON = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Time one batch of random prompts in an engine in this process, again and again.

    Greedy, to the full output length. Every batch has prompts of its own, so that none is cached.
    """
    from sagellm.lab.bench.offline import measure_latency
    from sagellm.lab.cli.bench.offline import run_offline
    from sagellm.lab.cli.bench.show import print_comparison

    if compare:
        print_comparison(compare, as_json=as_json, save=save)
        return
    own = latency_options(options)
    check_targets(save, overwrite=overwrite)
    run_offline("latency", measure_latency, own, options, config=config, save=save, as_json=as_json)
