"""One flag for each setting of an engine, from the table of settings and the schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from sagellm.core import PluginRegistry
from sagellm.engines.cli.flags import command_help, make_flag, switch
from sagellm.engines.config.explain import kind_of
from sagellm.engines.config.settings import FLAT_NAMES, PROVIDER_KINDS, flag_of
from sagellm.engines.config.text import field_of

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")
]

_METAVARS = {int: "INT", float: "FLOAT", tuple: "LIST", dict: "MAPPING"}


def setting_flag(name: str, key: str) -> inspect.Parameter:
    """Make the flag of a setting; its text is read by the schema."""
    field = field_of(key)
    kind, _ = kind_of(field)
    help_text = command_help(field.description or "", field.get_default(call_default_factory=True))
    if kind is bool:
        return make_flag(name, bool, switch(name, help_text))
    completion = _completion(key, kind)
    metavar = _METAVARS.get(get_origin(kind) or kind, "TEXT")
    option: Any = typer.Option(
        flag_of(name), help=help_text, metavar=metavar, show_default=False, autocompletion=completion
    )
    return make_flag(name, str, option)


def _completion(key: str, kind: Any) -> Callable[[str], list[str]] | None:
    """Complete choices, and names of what is installed; of mappings nothing."""
    if get_origin(kind) is dict or (get_origin(kind) is not Literal and key not in PROVIDER_KINDS):
        return None

    def complete(incomplete: str) -> list[str]:
        if key not in PROVIDER_KINDS:
            names: list[str] = list(get_args(kind))
        else:
            names = [entry.provider.name for entry in PluginRegistry.load().providers(PROVIDER_KINDS[key])]
        return [name for name in names if name.startswith(incomplete)]

    return complete


ENGINE_FLAGS = tuple(setting_flag(name, key) for name, key in FLAT_NAMES.items())
"""All but switches arrive as text, so that one place, the schema, says what a value may be."""

MODEL_FLAG = ENGINE_FLAGS[:1]
"""What stands first where a command has other tables too."""
