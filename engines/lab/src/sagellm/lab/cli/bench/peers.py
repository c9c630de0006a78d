"""`bench peers`: a named load on an engine started for it, and on peers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG
from sagellm.engines.cli.flags import make_flag, switch
from sagellm.lab.cli.bench.flags import parse_goodput
from sagellm.lab.cli.bench.measurement import CONFIG_FLAG, REQUEST_FLAGS, engine_config, measurement
from sagellm.lab.cli.flags import flag

if TYPE_CHECKING:
    from sagellm.lab.bench.benchmark import BenchmarkSettings
    from sagellm.lab.bench.results import Result

_LOAD = "Load"
_flag = partial(flag, group=_LOAD)

_OWN = (
    _flag("workload", str, "NAME", "mixed, chat, batch, document or sharegpt. [default: mixed]"),
    _flag("duration", float, "SECONDS", "Time for each server, both phases together. [default: 60]"),
    _flag("concurrency", int, "INT", "Callers of the first phase, who do not pause. [default: 32]"),
    _flag(
        "rate", float, "FLOAT",
        "Requests per second: the second phase alone. [default: 0.6 of what the slowest server reached]",
    ),
    _flag(
        "peers", list[str], "NAME=URL|vllm=PYTHON",
        "A server that gets the same load: one that is running, or vLLM started from its environment.",
        "--peer",
    ),
    _flag("base_url", str, "URL", "Use a sageLLM server that is already running instead of starting one."),
    _flag("max_len", int, "INT", "Longest prompt and output together. [default: 4096, or the model's]"),
    _flag("vocab_size", int, "INT", "Token ids lie below this. [default: the model's, 4000 with --base-url]"),
    _flag("seed", int, "INT", "The same seed makes the same sessions. [default: 0]"),
    _flag("goodput", list[str], "ttft:MS tpot:MS…", "Count the requests within these limits too."),
    make_flag(
        "priorities", bool,
        switch(
            "priorities", "Send each request's priority; off for servers that refuse it. [default: true]",
            group=_LOAD,
        ),
    ),
)  # fmt: skip

SYNONYMS = (
    make_flag(
        "enable_prefix_cache",
        bool,
        typer.Option("--enable-prefix-cache/--disable-prefix-cache", hidden=True),
    ),
    make_flag("enable_predictive_eviction", bool, typer.Option("--enable-predictive-eviction", hidden=True)),
    make_flag("scheduler_ir", str, typer.Option(hidden=True)),
)
"""Spellings that people may know; `_in_our_words` says what they mean."""


def _peers(options: dict[str, Any]) -> Result:
    """Serve a model, put a named load on it, and on peers beside it; end the servers that were started.

    The first half of the time shows the throughput with many callers, the second half what urgent requests
    wait at a rate that all servers carry; before both, what one waits alone. Hit rates stand beside what a
    cache without limit would reach.
    """
    from sagellm.engines.cli.model import say_if_embedded
    from sagellm.engines.held_interrupts import interrupted_by_sigterm
    from sagellm.engines.metrics.limits import engine_limits
    from sagellm.lab.bench.benchmark import headline, measurement_errors, run_benchmark
    from sagellm.lab.bench.results import make_result, request_rows

    settings = _settings(options)
    config = engine_config(_in_our_words(options))
    if settings.base_url is None:
        say_if_embedded(config.model.name)
    with interrupted_by_sigterm():  # as the servers end with the block that started them
        done = run_benchmark(
            config, settings, measure=engine_limits, say=lambda text: typer.echo(f"{text} …", err=True)
        )
    return make_result(
        "benchmark",
        settings.shown() | {"engine": config.values()},
        headline(done),
        phases=done.figures,
        rates=done.rates,
        servers={name: {"start_s": one.start_s} for name, one in done.servers.items()},
        limits=done.machine,
        measurement_errors=measurement_errors(done.figures),
    ) | {
        "requests": {
            f"{phase} {server}": request_rows(run)
            for phase, runs in done.runs.items()
            for server, run in runs.items()
        }
    }


def _settings(options: dict[str, Any]) -> BenchmarkSettings:
    """Take the benchmark's own options out of `options`; the rest are the engine's."""
    from sagellm.lab.bench.benchmark import BenchmarkSettings
    from sagellm.lab.bench.contenders import PeerSpec

    own: dict[str, Any] = {flag.name: options.pop(flag.name) for flag in _OWN if flag.name in options}
    if "peers" in own:
        own["peers"] = tuple(map(PeerSpec.parse, own["peers"]))
    if "goodput" in own:
        own["goodput"] = parse_goodput(own["goodput"])
    return BenchmarkSettings(**own)


def _in_our_words(options: dict[str, Any]) -> dict[str, Any]:
    """Replace other spellings of the engine's flags by ours."""
    given = dict(options)
    if (is_enabled := given.pop("enable_prefix_cache", None)) is not None:
        given.setdefault("enable_prefix_caching", is_enabled)
    if given.pop("enable_predictive_eviction", False):
        given.setdefault("eviction_policy", "predictive")
    if (scheduler := given.pop("scheduler_ir", None)) is not None:
        given.setdefault("scheduler", scheduler)
    return given


app = measurement(_peers, MODEL_FLAG, REQUEST_FLAGS, _OWN, CONFIG_FLAG, ENGINE_FLAGS, SYNONYMS)
