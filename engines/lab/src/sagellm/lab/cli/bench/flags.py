"""The flags of `bench`: one per field of the settings, from tables."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core import ConfigError, nearest
from sagellm.engines.cli.flags import command_help, make_flag, switch
from sagellm.lab.bench.figures import Limits
from sagellm.lab.bench.settings import LoadSettings
from sagellm.lab.cli.flags import LENGTHS, find_trace, flag
from sagellm.lab.traces.lengths import Lengths


class _Row(NamedTuple):
    kind: Any
    metavar: str
    text: str


_PROMPTS = {
    "num_prompts": _Row(int, "INT", "prompts to run"),
    "input_len": _Row(str, "LENGTHS", f"prompt tokens: {LENGTHS}"),
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

_OFFLINE: dict[str, dict[str, tuple[object, _Row]]] = {
    "throughput": {
        name: (default, _PROMPTS[name])
        for name, default in {
            "num_prompts": 100, "input_len": "512", "output_len": "128",
            "prefix_share": 0.0, "num_prefixes": 1, "warmup": 1, "seed": 0,
        }.items()
    },
    "latency": {
        "batch_size": (1, _Row(int, "INT", "prompts that are run together")),
        "input_len": ("128", _PROMPTS["input_len"]),
        "output_len": ("128", _PROMPTS["output_len"]),
        "warmup": (1, _Row(int, "INT", "batches that are run before and not counted")),
        "repeats": (10, _Row(int, "INT", "batches that are timed, each with prompts of its own")),
        "seed": (0, _PROMPTS["seed"]),
    },
    "startup": {
        "warmup": (1, _Row(int, "INT", "starts before the counted ones")),
        "repeats": (3, _Row(int, "INT", "starts that are timed, each in a process of its own")),
    },
}  # fmt: skip
"""The own options of the benchmarks of an engine in this process, with defaults."""

_ALSO = {"rate": ("--request-rate",), "concurrency": ("--max-concurrency",)}  # as vLLM writes it

_GROUPS = {
    **dict.fromkeys(("base_url", "model", "api_key", "endpoint", "timeout_s"), "Server"),
    **dict.fromkeys(
        ("rate", "burstiness", "concurrency", "workload", "trace", "trace_format", "trace_speed"), "Load"
    ),
}
_REST = "Requests"
_MORE: dict[str, dict[str, Any]] = {
    "api_key": {"envvar": "OPENAI_API_KEY", "show_envvar": False},
    "trace": {"callback": find_trace},
}


def _flag(name: str, row: _Row, default: object) -> inspect.Parameter:
    help_text, group = command_help(row.text, default), _GROUPS.get(name, _REST)
    if row.kind is bool:
        return make_flag(name, bool, switch(name, help_text, group=group))
    spelled = ("--" + name.removesuffix("_s").replace("_", "-"), *_ALSO.get(name, ()))
    return flag(name, row.kind, row.metavar, help_text, *spelled, group=group, **_MORE.get(name, {}))


_DEFAULTS = {one.name: one.default for one in fields(LoadSettings)} | {"extra_body": None}
SERVE_FLAGS = tuple(_flag(name, row, _DEFAULTS[name]) for name, row in _SERVE.items())
OFFLINE_FLAGS = {
    benchmark: tuple(_flag(name, row, default) for name, (default, row) in rows.items())
    for benchmark, rows in _OFFLINE.items()
}


def offline_options(benchmark: str, options: dict[str, Any]) -> dict[str, Any]:
    """Take a benchmark's own options out of `options`, with defaults and lengths read."""
    own: dict[str, Any] = {
        name: options.pop(name, default) for name, (default, _) in _OFFLINE[benchmark].items()
    }
    return {name: Lengths.parse(value) if name.endswith("_len") else value for name, value in own.items()}


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
