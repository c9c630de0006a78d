"""The flags of `bench`: one per field of the settings, from tables."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from sagellm.core import ConfigError, nearest
from sagellm.engines.cli.flags import command_help, make_flag, switch
from sagellm.lab.bench.figures import Limits
from sagellm.lab.bench.settings import LoadSettings
from sagellm.lab.traces.lengths import Lengths

Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to a JSON file.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Compare = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="A.json B.json…",
        help="Run nothing; print saved results beside each other, with ratios to the first.",
    ),
]


class _Row(NamedTuple):
    kind: Any
    metavar: str
    text: str


_LENGTHS = "512, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA or exponential:MEAN"

_PROMPTS = {
    "num_prompts": _Row(int, "INT", "prompts to run"),
    "input_len": _Row(str, "LENGTHS", f"prompt tokens: {_LENGTHS}"),
    "output_len": _Row(str, "LENGTHS", "output tokens, in the same form"),
    "prefix_share": _Row(float, "SHARE", "share of each prompt, from its start, that prompts have in common"),
    "num_prefixes": _Row(int, "INT", "how many such common beginnings there are"),
    "warmup": _Row(int, "INT", "requests that are run before and not counted"),
    "seed": _Row(int, "INT", "seed of prompts and lengths; the same seed makes the same ones"),
}

_SERVE = {
    "base_url": _Row(str, "URL", "where the server is, with the path before /completions"),
    "model": _Row(str, "NAME", "model as the server names it; not needed when it serves one"),
    "api_key": _Row(str, "KEY", "the server's key; better in the environment, as OPENAI_API_KEY"),
    "endpoint": _Row(str, "completions|chat", "what is asked for"),
    **_PROMPTS,
    "num_prompts": _Row(int, "INT", "requests to send; 100, or the whole trace, unless it is given"),
    "prompt_form": _Row(
        str, "auto|ids|text", "token ids, or words for servers that take none; auto sends words to chat alone"
    ),
    "vocab_size": _Row(int, "INT", "draw token ids below this number"),
    "rate": _Row(float, "FLOAT", "requests a second; inf, or no rate, trace and concurrency: all at once"),
    "burstiness": _Row(float, "FLOAT", "regularity of arrivals: 1 is Poisson, less comes in bursts"),
    "concurrency": _Row(int, "INT", "callers of a closed loop; with a rate or trace, most requests at once"),
    "workload": _Row(str, "NAME", "sessions of a named load: mixed, chat, batch, document or sharegpt"),
    "trace": _Row(Path, "FILE", "take arrivals and lengths from a trace: Azure's CSV, or JSONL"),
    "trace_format": _Row(str, "NAME", "a trace reader by name; else the file shows its format"),
    "trace_speed": _Row(float, "FLOAT", "run the trace this many times as fast"),
    "max_len": _Row(
        int, "INT", "leave out requests of a trace or workload with more tokens, prompt and output together"
    ),
    "timeout_s": _Row(float, "SECONDS", "time limit for one answer"),
    "temperature": _Row(float, "FLOAT", "randomness of the answers"),
    "ignore_eos": _Row(bool, "", "ask for answers of full length; off for servers that refuse ignore_eos"),
    "extra_body": _Row(str, "JSON", "more fields of each request's body"),
    "goodput": _Row(
        list[str], "ttft:MS tpot:MS…", "count the requests within these limits too: ttft, tpot, e2e in ms"
    ),
}

_THROUGHPUT_DEFAULTS = {
    "num_prompts": 100, "input_len": "512", "output_len": "128",
    "prefix_share": 0.0, "num_prefixes": 1, "warmup": 1, "seed": 0,
}  # fmt: skip
_LATENCY_DEFAULTS = {
    "batch_size": 1, "input_len": "128", "output_len": "128", "warmup": 1, "repeats": 10, "seed": 0,
}  # fmt: skip
_LATENCY = {
    **_PROMPTS,
    "batch_size": _Row(int, "INT", "prompts that are run together"),
    "warmup": _Row(int, "INT", "batches that are run before and not counted"),
    "repeats": _Row(int, "INT", "batches that are timed, each with prompts of its own"),
}


_STARTUP_DEFAULTS = {"warmup": 1, "repeats": 3}
_STARTUP = {
    "warmup": _Row(int, "INT", "starts before the counted ones"),
    "repeats": _Row(int, "INT", "starts that are timed, each in a process of its own"),
}

_ALSO = {"rate": ("--request-rate",), "concurrency": ("--max-concurrency",)}  # as vLLM writes it

_GROUPS = {
    **dict.fromkeys(("base_url", "model", "api_key", "endpoint", "timeout_s"), "Server"),
    **dict.fromkeys(
        ("rate", "burstiness", "concurrency", "workload", "trace", "trace_format", "trace_speed"), "Load"
    ),
}
_REST = "Requests"


def _flag(name: str, row: _Row, default: object) -> inspect.Parameter:
    help_text = command_help(row.text, default)
    if row.kind is bool:
        return make_flag(name, bool, switch(name, help_text, group=_REST))
    option: Any = typer.Option(
        "--" + name.removesuffix("_s").replace("_", "-"),
        *_ALSO.get(name, ()),
        help=help_text,
        metavar=row.metavar,
        show_default=False,
        envvar="OPENAI_API_KEY" if name == "api_key" else None,
        show_envvar=False,
        rich_help_panel=_GROUPS.get(name, _REST),
    )
    return make_flag(name, row.kind, option)


def _flags(rows: Mapping[str, _Row], defaults: Mapping[str, object]) -> tuple[inspect.Parameter, ...]:
    return tuple(_flag(name, rows[name], default) for name, default in defaults.items())


_SERVE_DEFAULTS = {one.name: one.default for one in fields(LoadSettings)}
SERVE_FLAGS = _flags(
    _SERVE,
    {name: None if name == "extra_body" else _SERVE_DEFAULTS[name] for name in _SERVE},
)
THROUGHPUT_FLAGS = _flags(_PROMPTS, _THROUGHPUT_DEFAULTS)
LATENCY_FLAGS = _flags(_LATENCY, _LATENCY_DEFAULTS)
STARTUP_FLAGS = _flags(_STARTUP, _STARTUP_DEFAULTS)


def offline_options(defaults: Mapping[str, object], options: dict[str, Any]) -> dict[str, Any]:
    """Take a benchmark's own options out of `options`, with defaults and lengths read."""
    own = {name: options.pop(name, default) for name, default in defaults.items()}
    return {name: Lengths.parse(value) if name.endswith("_len") else value for name, value in own.items()}


def throughput_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `throughput` out of `options`; the rest are the engine's."""
    return offline_options(_THROUGHPUT_DEFAULTS, options)


def latency_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `latency` out of `options`; the rest are the engine's."""
    own = offline_options(_LATENCY_DEFAULTS, options)
    return {"num_prompts": own.pop("batch_size"), **own}


def startup_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `startup` out of `options`; the rest are the engine's."""
    return offline_options(_STARTUP_DEFAULTS, options)


def parse_goodput(given: list[str]) -> Limits:
    """Read `ttft:500`, `tpot:50`. Raises ConfigError."""
    known = {one.name.removesuffix("_ms"): one.name for one in fields(Limits)}
    limits: dict[str, float] = {}
    for text in (part for one in given for part in one.replace(",", " ").split()):
        name, _, value = text.partition(":")
        if name not in known:
            raise ConfigError(
                f"--goodput {text!r} limits nothing that is known; there are {', '.join(known)}."
                f"{nearest(name, known)}"
            )
        try:
            limits[known[name]] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {text!r} has no limit; write {name}:500 for 500 ms") from None
    return Limits(**limits)
