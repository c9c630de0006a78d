"""One flag per setting of the HTTP server."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from sagellm.engines.cli.engine_flags import group_of, setting_flag
from sagellm.engines.cli.flags import command_help, make_flag
from sagellm.engines.config.schema import field_of
from sagellm.engines.config.settings import SERVER_NAMES


def _repeatable(name: str, key: str, metavar: str) -> inspect.Parameter:
    help_text = command_help(field_of(key).description or "")
    option: Any = typer.Option(
        f"--{name.replace('_', '-')}",
        help=f"{help_text} May be given more than once.",
        metavar=metavar,
        show_default=False,
        rich_help_panel=group_of(key),
    )
    return make_flag(name, list[str], option)


_REPEATABLE = {
    "api_key": "KEY",
    "allowed_hosts": "HOST",
    "allowed_origins": "ORIGIN",
    "metrics_allow": "ADDRESS",
    "public_namespaces": "NAME",
    "served_model_name": "NAME",
}

_ALSO = {"access_log": (" /--disable-uvicorn-access-log",)}  # as vLLM writes it


def _flag(name: str, key: str) -> inspect.Parameter:
    if name in _REPEATABLE:
        return _repeatable(name, key, _REPEATABLE[name])
    return setting_flag(name, key, *_ALSO.get(name, ()))


SERVER_FLAGS = tuple(_flag(name, key) for name, key in SERVER_NAMES.items())
