"""`bench startup`: how long an engine takes to start."""

from __future__ import annotations

from typing import Any

import typer

from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.engines.cli.variadic import VariadicCommand
from sagellm.lab.cli.bench.flags import STARTUP_FLAGS, AsJSON, Compare, Save, startup_options

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(cls=VariadicCommand)
@with_flags(MODEL_FLAG, STARTUP_FLAGS, ENGINE_FLAGS)
def startup(
    *,
    save: Save = None,
    overwrite: Overwrite = False,
    compare: Compare = None,
    as_json: AsJSON = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Start an engine in fresh processes, and time each until it is ready and until its first token.

    The starts that are not counted leave the model's files in the page cache.
    """
    from sagellm.engines.cli.model import say_if_embedded
    from sagellm.engines.config.sources import load_config
    from sagellm.lab.bench.results import make_result, save_result
    from sagellm.lab.bench.startup import StartupSettings, measure_startup
    from sagellm.lab.cli.bench.show import print_comparison, print_result

    if compare:
        print_comparison(compare, as_json=as_json, save=save)
        return
    own = startup_options(options)
    settings = StartupSettings(**own)
    loaded = load_config(options, config_file=config).config
    check_targets(save, overwrite=overwrite)
    say_if_embedded(loaded.model.name)
    figures = measure_startup(loaded, settings, progress=True)
    result = make_result("startup", own | {"engine": loaded.values()}, figures)
    print_result(result, as_json=as_json)
    if save is not None:
        save_result(result, save)
