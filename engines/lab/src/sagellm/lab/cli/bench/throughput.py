"""`bench throughput`: how much an engine in this process achieves with many prompts."""

from __future__ import annotations

from typing import Any

import typer

from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.engines.cli.variadic import VariadicCommand
from sagellm.lab.cli.bench.flags import THROUGHPUT_FLAGS, AsJSON, Compare, Save, throughput_options

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=VariadicCommand)
@with_flags(MODEL_FLAG, THROUGHPUT_FLAGS, ENGINE_FLAGS)
def throughput(
    *,
    save: Save = None,
    overwrite: Overwrite = False,
    compare: Compare = None,
    as_json: AsJSON = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Run many prompts of random tokens at once through an engine in this process.

    Greedy, to the full output length. Prints requests, output tokens and all tokens a second.
    """
    from sagellm.lab.bench.offline import measure_throughput
    from sagellm.lab.cli.bench.offline import run_offline
    from sagellm.lab.cli.bench.show import print_comparison

    if compare:
        print_comparison(compare, as_json=as_json, save=save)
        return
    own = throughput_options(options)
    check_targets(save, overwrite=overwrite)
    run_offline("throughput", measure_throughput, own, options, config=config, save=save, as_json=as_json)
