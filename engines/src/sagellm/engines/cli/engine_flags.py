"""One flag per engine setting, from the table of settings and the schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from sagellm.core import ProviderSpec
from sagellm.engines.cli.command import PARALLEL_FLAGS
from sagellm.engines.cli.flags import command_help, make_flag, switch
from sagellm.engines.cli.names import complete_providers
from sagellm.engines.config.explain import kind_of
from sagellm.engines.config.schema import AUTO, PROVIDER_KINDS, WITH_AUTO, field_of
from sagellm.engines.config.settings import FLAT_NAMES, flag_of

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")
]

_GROUPS = {
    "engine": "Model",
    "model": "Model",
    "kv": "KV memory",
    "prefix_cache": "Prefix cache",
    "scheduler": "Scheduling",
    "predictor": "Scheduling",
    "speculation": "Speculation",
    "forward": "Forward pass",
    "sampling": "Sampling",
    "trace": "Trace",
    "recording": "Recording",
    "comm": "Machine",
    "grammar": "Structured output",
    "server": "HTTP server",
}
"""Section of the schema → the heading of its flags in the help."""

_METAVARS = {int: "INT", float: "FLOAT", tuple: "LIST", ProviderSpec: "NAME[{…}]"}


def setting_flag(name: str, key: str, *also: str, group: str = "") -> inspect.Parameter:
    """Build the flag of a setting, with further spellings; the schema parses its value.

    In the help it stands under `group`, by default that of the setting's section.
    """
    field = field_of(key)
    kind, _ = kind_of(field)
    help_text = command_help(field.description or "", field.get_default(call_default_factory=True))
    if kind is bool:
        return make_flag(name, bool, switch(name, help_text, *also, group=group or group_of(key)))
    completion = _completion(key, kind)
    metavar = _METAVARS.get(get_origin(kind) or kind, "TEXT")
    option: Any = typer.Option(
        flag_of(name),
        *also,
        help=help_text,
        metavar=metavar,
        show_default=False,
        autocompletion=completion,
        rich_help_panel=group or group_of(key),
    )
    return make_flag(name, str, option)


def group_of(key: str) -> str:
    """Return the heading of the help under which a setting's flag is listed."""
    return _GROUPS[key.partition(".")[0]]


def _completion(key: str, kind: Any) -> Callable[[str], list[str]] | None:
    """Return a completion of choices or of installed providers' names."""
    if key in PROVIDER_KINDS:
        return complete_providers(PROVIDER_KINDS[key], *([AUTO] if key in WITH_AUTO else ()))
    if get_origin(kind) is not Literal:
        return None
    return lambda incomplete: [name for name in get_args(kind) if name.startswith(incomplete)]


ENGINE_FLAGS = (*(setting_flag(name, key) for name, key in FLAT_NAMES.items()), *PARALLEL_FLAGS)
"""All but switches arrive as text, so that only the schema decides which values are valid."""

MODEL_FLAG = ENGINE_FLAGS[:1]
"""Placed first in commands that have other tables too."""
