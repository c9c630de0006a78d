"""What `throughput` and `latency` share: an engine is loaded, measured, and the result shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sagellm.engines.cli.model import start_engine
from sagellm.engines.config.sources import load_config
from sagellm.lab.bench.offline import OfflineSettings, memory_figures
from sagellm.lab.bench.results import make_result, save_result
from sagellm.lab.cli.bench.show import print_result


def run_offline(  # noqa: PLR0913  (what a command was given)
    name: str,
    measure: Callable[..., Any],
    own: dict[str, Any],
    engine_settings: dict[str, Any],
    *,
    config: Path | None,
    save: Path | None,
    as_json: bool,
) -> None:
    """Load the engine, measure, print and save. Raises ConfigError before anything is loaded."""
    settings = OfflineSettings(**own)
    loaded = load_config(engine_settings, config_file=config)
    started = time.perf_counter()
    engine = start_engine(loaded.config)
    start_s = time.perf_counter() - started
    with engine:
        figures = measure(engine, settings, progress=True)
        memory = memory_figures(engine)
    result = make_result(
        name,
        settings.shown() | {"engine": engine.config.values()},
        figures,
        engine={"start_s": start_s, **asdict(memory)},
    )
    print_result(result, as_json=as_json)
    if save is not None:
        save_result(result, save)
