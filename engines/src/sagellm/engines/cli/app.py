"""The trees of commands: `sage`, and `sagellm`, which is `sage llm`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sagellm.engines import __version__
from sagellm.engines.cli.lazy import Entry, LazyGroup

_HERE = "sagellm.engines.cli"

_CONFIG = Entry(f"{_HERE}.config:app", "Show the settings and where they come from.")
_DOCTOR = Entry(f"{_HERE}.doctor.command:app", "Say what was found here, what is wrong and how to fix it.")
_PLUGINS = Entry(f"{_HERE}.plugins:app", "List installed plugins, describe one, or test it.")

_MODULES = {
    "eviction": "eviction policy",
    "tiers": "KV tiers",
    "predictor": "lifetime predictor",
    "accel": "quantizer",
    "comm": "topology",
}


class LLMGroup(LazyGroup):
    """The commands of `sage llm`."""

    table = {  # noqa: RUF012  (typed in the base)
        "generate": Entry(f"{_HERE}.generate:app", "Answer prompts, or continue them."),
        "chat": Entry(f"{_HERE}.chat.command:app", "Chat with a model."),
        "serve": Entry(f"{_HERE}.serve:app", "Serve a model over HTTP, as the OpenAI API."),
        "verify": Entry(f"{_HERE}.verify:app", "Compare a model's greedy tokens with transformers'."),
        "bench": Entry(f"{_HERE}.bench.command:app", "Measure servers and engines: throughput and latency."),
        "benchmark": Entry(f"{_HERE}.benchmark:app", "Send a named load to an engine and to peers."),
        "simulate": Entry(f"{_HERE}.simulate:app", "Simulate serving a trace, or its prefix cache."),
        "trace": Entry(f"{_HERE}.trace:app", "Make traces of load, and show what is in one."),
        "engine": Entry(f"{_HERE}.engine.app:app", "Start, show and stop engines."),
        "explain": Entry(f"{_HERE}.explain:app", "Say what a running engine's scheduler decided, and why."),
        "scheduler": Entry(f"{_HERE}.scheduler:app", "Watch and change the scheduler of a running engine."),
        "cache": Entry(f"{_HERE}.cache:app", "Watch and change the prefix cache of a running engine."),
        "pool": Entry(f"{_HERE}.pool:app", "Watch and compact the KV pool of a running engine."),
        **{
            name: Entry(f"{_HERE}.stats:{name}", f"Watch the {what} of a running engine.")
            for name, what in _MODULES.items()
        },
        "plugins": _PLUGINS,
        "config": _CONFIG,
        "doctor": _DOCTOR,
        "topology": Entry(f"{_HERE}.topology:app", "Show this machine's CPUs, memory, GPUs and network."),
    }
    synonyms = {"llm": ""}  # noqa: RUF012  (typed in the base)


class SageGroup(LazyGroup):
    """The commands of `sage`."""

    table = {  # noqa: RUF012  (typed in the base)
        "llm": Entry(f"{_HERE}.app:llm", "Language models: everything that sageLLM does."),
        "plugins": _PLUGINS,
        "config": _CONFIG,
        "doctor": _DOCTOR,
    }
    elsewhere = dict.fromkeys(LLMGroup.table, "sage llm")


def _print_version(value: bool) -> None:  # noqa: FBT001  (typer calls it)
    if value:
        typer.echo(f"sageLLM {__version__}")
        raise typer.Exit


def _set_debug(ctx: typer.Context, value: bool) -> None:  # noqa: FBT001  (typer calls it)
    if value and ctx.obj is not None:
        ctx.obj.debug = True


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show a traceback when something fails (also SAGELLM_DEBUG=1).",
            callback=_set_debug,
            is_eager=True,
            expose_value=False,
        ),
    ] = False,
) -> None:
    """Run language models with sageLLM."""


def _make(group: type[LazyGroup], *, add_completion: bool) -> typer.Typer:
    options: dict[str, Any] = {
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    made = typer.Typer(cls=group, add_completion=add_completion, **options)
    made.callback()(_root)
    return made


sage = _make(SageGroup, add_completion=True)
llm = _make(LLMGroup, add_completion=False)
sagellm = _make(LLMGroup, add_completion=True)
