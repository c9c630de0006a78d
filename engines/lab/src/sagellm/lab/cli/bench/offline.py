"""`bench throughput · latency · startup`: an engine in this process, or in fresh ones, is measured."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG
from sagellm.lab.cli.bench.flags import OFFLINE_FLAGS, offline_options
from sagellm.lab.cli.bench.measurement import CONFIG_FLAG, engine_config, measurement

if TYPE_CHECKING:
    from collections.abc import Callable

    from sagellm.lab.bench.results import Result


def _throughput(options: dict[str, Any]) -> Result:
    """Run many prompts of random tokens at once through an engine in this process.

    Greedy, to the full output length. Prints requests, output tokens and all tokens a second.
    """
    from sagellm.lab.bench.offline import measure_throughput

    return _measured("throughput", measure_throughput, offline_options("throughput", options), options)


def _latency(options: dict[str, Any]) -> Result:
    """Time one batch of random prompts in an engine in this process, again and again.

    Greedy, to the full output length. Every batch has prompts of its own, so that none is cached.
    """
    from sagellm.lab.bench.offline import measure_latency

    own = offline_options("latency", options)
    own["num_prompts"] = own.pop("batch_size")
    return _measured("latency", measure_latency, own, options)


def _startup(options: dict[str, Any]) -> Result:
    """Start an engine in fresh processes, and time each until it is ready and until its first token.

    The starts that are not counted leave the model's files in the page cache.
    """
    from sagellm.engines.cli.model import say_if_embedded
    from sagellm.lab.bench.results import make_result
    from sagellm.lab.bench.startup import StartupSettings, measure_startup

    own = offline_options("startup", options)
    settings = StartupSettings(**own)
    config = engine_config(options)
    say_if_embedded(config.model.name)
    figures = measure_startup(config, settings, progress=True)
    return make_result("startup", own | {"engine": config.values()}, figures)


def _measured(name: str, measure: Callable[..., Any], own: dict[str, Any], options: dict[str, Any]) -> Result:
    """Load the engine and measure it. Raises ConfigError before anything is loaded."""
    from sagellm.engines.cli.model import start_engine
    from sagellm.lab.bench.offline import OfflineSettings, memory_figures
    from sagellm.lab.bench.results import make_result

    settings = OfflineSettings(**own)
    config = engine_config(options)
    started = time.perf_counter()
    with start_engine(config) as engine:
        start_s = time.perf_counter() - started
        figures = measure(engine, settings, progress=True)
        memory = memory_figures(engine)
        profile = {} if engine.profile is None else {"profile": engine.profile.figures()}
    return make_result(
        name,
        settings.shown() | {"engine": engine.config.values()},
        figures,
        engine={"start_s": start_s, **asdict(memory)},
        **profile,
    )


throughput, latency, startup = (
    measurement(measure, MODEL_FLAG, OFFLINE_FLAGS[measure.__name__[1:]], CONFIG_FLAG, ENGINE_FLAGS)
    for measure in (_throughput, _latency, _startup)
)
