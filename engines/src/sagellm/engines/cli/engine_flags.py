"""One flag for each setting of an engine, from the table of settings and the schema."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from sagellm.engines.cli.flags import command_help, make_flag, switch
from sagellm.engines.config.explain import kind_of
from sagellm.engines.config.settings import FLAT_NAMES, flag_of
from sagellm.engines.config.text import field_of

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")
]

_METAVARS = {int: "INT", float: "FLOAT", tuple: "LIST", dict: "MAPPING"}


def _flag(name: str, key: str) -> inspect.Parameter:
    field = field_of(key)
    kind, _ = kind_of(field)
    help_text = command_help(field.description or "", field.get_default(call_default_factory=True))
    if kind is bool:
        return make_flag(name, bool, switch(name, help_text))
    metavar = _METAVARS.get(get_origin(kind) or kind, "TEXT")
    option: Any = typer.Option(flag_of(name), help=help_text, metavar=metavar, show_default=False)
    return make_flag(name, str, option)


ENGINE_FLAGS = tuple(_flag(name, key) for name, key in FLAT_NAMES.items())
"""All but switches arrive as text, so that one place, the schema, says what a value may be."""
