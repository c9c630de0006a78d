"""The trees of commands: `sage`, and `sagellm`, which is `sage llm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sagellm.engines import __version__
from sagellm.engines.cli.lazy import Entry, LazyGroup, installed_commands

_FIRST = (
    *("generate", "chat", "serve", "verify", "quantize", "bench", "benchmark", "simulate", "trace"),
    *("engine", "explain"),
    *("scheduler", "cache", "pool", "eviction", "tiers", "predictor", "accel", "comm"),
    *("adapter", "plugins", "config", "doctor", "topology"),
)
"""The order of commands in the help; all others follow."""

_HOMES = {
    "sagellm-server": (
        *("serve", "engine", "explain", "scheduler", "cache", "pool"),
        *("eviction", "tiers", "predictor", "accel", "comm"),
    ),
    "sagellm-lab": ("bench", "benchmark", "simulate", "trace"),
}
"""Our distributions that may be missing here, and the commands that come with them."""

_OF_SAGE = ("plugins", "config", "doctor")


class LLMGroup(LazyGroup):
    """The commands of `sage llm`."""

    synonyms = {"llm": ""}  # noqa: RUF012  (typed in the base)
    elsewhere = {  # noqa: RUF012  (typed in the base)
        name: f"It comes with {home}: pip install {home}" for home, names in _HOMES.items() for name in names
    }

    @property
    def table(self) -> Mapping[str, Entry]:
        """What plugins add."""
        found = {name: entry for name, entry in installed_commands().items() if " " not in name}
        names = sorted(found, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
        return {name: found[name] for name in names}


class SageGroup(LazyGroup):
    """The commands of `sage`."""

    elsewhere = {  # noqa: RUF012  (typed in the base)
        name: f"Did you mean `sage llm {name}`?" for name in _FIRST
    }

    @property
    def table(self) -> Mapping[str, Entry]:
        """Everything under `llm`, and what is not about models."""
        llm = Entry(f"{__name__}:llm", "Language models: everything that sageLLM does.")
        return {"llm": llm, **{name: installed_commands()[name] for name in _OF_SAGE}}


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
