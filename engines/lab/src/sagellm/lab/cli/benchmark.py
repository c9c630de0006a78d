"""`benchmark`: a named load on an engine started for it, beside peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, MODEL_FLAG, ConfigFile
from sagellm.engines.cli.flags import make_flag, with_flags
from sagellm.engines.cli.model import say_if_embedded
from sagellm.engines.cli.targets import Overwrite, check_targets
from sagellm.engines.cli.variadic import VariadicCommand
from sagellm.engines.config.sources import load_config
from sagellm.lab.cli.bench.flags import AsJSON, Compare, Save, parse_goodput
from sagellm.lab.plots import check_plot

if TYPE_CHECKING:
    from sagellm.lab.bench.benchmark import BenchmarkRun, BenchmarkSettings
    from sagellm.lab.bench.results import Result

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_LOAD = "Load"


def _flag(name: str, kind: Any, metavar: str, text: str) -> Any:
    spelled = "--" + ("peer" if name == "peers" else name.replace("_", "-"))
    option = typer.Option(spelled, metavar=metavar, help=text, show_default=False, rich_help_panel=_LOAD)
    return make_flag(name, kind, option)


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
    ),
    _flag("base_url", str, "URL", "Use a sageLLM server that is already running instead of starting one."),
    _flag("max_len", int, "INT", "Longest prompt and output together. [default: 4096, or the model's]"),
    _flag("vocab_size", int, "INT", "Token ids lie below this. [default: the model's, 4000 with --base-url]"),
    _flag("seed", int, "INT", "The same seed makes the same sessions. [default: 0]"),
    _flag("goodput", list[str], "ttft:MS tpot:MS…", "Count the requests within these limits too."),
    _flag("plot", Path, "FILE", "Draw all requests' times (needs matplotlib)."),
    _flag("chrome_trace", Path, "FILE", "Write all requests as a trace that Perfetto opens."),
    make_flag(
        "priorities", bool,
        typer.Option(
            "--priorities/--no-priorities", show_default=False, rich_help_panel=_LOAD,
            help="Send each request's priority; off for servers that refuse it. [default: true]",
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


@app.command(cls=VariadicCommand)
@with_flags(MODEL_FLAG, _OWN, ENGINE_FLAGS, SYNONYMS)
def benchmark(
    *,
    save: Save = None,
    overwrite: Overwrite = False,
    compare: Compare = None,
    as_json: AsJSON = False,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Serve a model, put a named load on it, and on peers beside it; end the servers that were started.

    The first half of the time shows the throughput with many callers, the second half what urgent requests
    wait at a rate that all servers carry. Hit rates stand beside what a cache without limit would reach.
    """
    from sagellm.lab.cli.bench.show import print_comparison

    plot, chrome_trace = options.pop("plot", None), options.pop("chrome_trace", None)
    if compare:
        print_comparison(compare, as_json=as_json, save=save, plot=plot)
        return
    settings = _settings(options)
    loaded = load_config(_in_our_words(options), config_file=config)
    check_plot(plot)
    check_targets(save, plot, chrome_trace, overwrite=overwrite)
    result = _measure(loaded.config, settings)
    _print(result, as_json=as_json)
    _write(result, save=save, plot=plot, chrome_trace=chrome_trace)


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


def _measure(config: Any, settings: BenchmarkSettings) -> Result:
    from sagellm.lab.bench.benchmark import headline, measurement_errors, run_benchmark
    from sagellm.lab.bench.results import make_result, request_rows
    from sagellm.lab.bench.roofline import engine_limits

    if settings.base_url is None:
        say_if_embedded(config.model.name)
    done = run_benchmark(
        config, settings, measure=engine_limits, say=lambda text: typer.echo(f"{text} …", err=True)
    )
    result = make_result(
        "benchmark",
        settings.shown() | {"engine": config.values()},
        headline(done.figures),
        phases={name: dict(servers) for name, servers in done.figures.items()},
        rates=done.rates,
        servers=_servers(done),
        limits=done.machine,
        measurement_errors=measurement_errors(done.figures),
    )
    result["requests"] = {
        f"{phase} {server}": request_rows(run.load_run())
        for phase, runs in done.runs.items()
        for server, run in runs.items()
    }
    return result


def _servers(done: BenchmarkRun) -> dict[str, dict[str, float | None]]:
    return {name: {"start_s": one.start_s} for name, one in done.servers.items()}


def _print(result: Result, *, as_json: bool) -> None:
    from sagellm.engines.cli.output import print_json
    from sagellm.lab.cli.bench.show import print_columns

    if as_json:
        print_json({key: value for key, value in result.items() if key != "requests"})
        return
    print_columns(result["figures"])
    limits, machine = result["limits"], result["machine"]
    typer.echo(f"\n{result['rates']['steady']:.3g} requests/s in the steady phase", err=True)
    if limits is not None:
        typer.echo(
            f"read bandwidth {limits['read_bandwidth_bytes_per_s'] / 1e9:.3g} GB/s "
            f"({limits['bandwidth_source']}), peak {limits['peak_flops_per_s'] / 1e12:.3g} TFLOP/s "
            f"({limits['peak_source']})",
            err=True,
        )
    for error in result["measurement_errors"]:
        typer.echo(f"error: {error}", err=True)
    typer.echo(f"{machine['cpu']}, {machine['cpus']} CPUs, sageLLM {machine['sagellm']}", err=True)


def _write(result: Result, *, save: Path | None, plot: Path | None, chrome_trace: Path | None) -> None:
    from sagellm.lab.bench.chrome_trace import write_chrome_trace
    from sagellm.lab.bench.plot import plot_rows
    from sagellm.lab.bench.results import save_result

    if chrome_trace is not None:
        write_chrome_trace(chrome_trace, result["requests"])
    if plot is not None:
        settings = result["settings"]
        served = settings["base_url"] or settings["engine"]["model.name"]
        plot_rows(result["requests"], plot, title=f"{served}: benchmark")
    if save is not None:
        save_result(result, save)
