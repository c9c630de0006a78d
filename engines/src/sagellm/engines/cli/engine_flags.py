"""Turns the table of settings into command-line flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic.fields import FieldInfo

from sagellm.engines.config.explain import kind_of
from sagellm.engines.config.settings import FLAT_NAMES, flag_of
from sagellm.engines.config.text import field_of

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Configuration file (YAML).")
]

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag for each setting; its `**settings` gets those that were given.

    All but switches arrive as text, so that one place, the schema, says what a value may be.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    taken = {parameter.name for parameter in own}
    flags = [_parameter(name, key) for name, key in FLAT_NAMES.items() if name not in taken]

    def run(*positional: Any, **given: Any) -> None:
        command(*positional, **{k: v for k, v in given.items() if k in taken or v is not None})

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__module__ = command.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in own + flags}
    run.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
    return run


def _parameter(name: str, key: str) -> inspect.Parameter:
    field = field_of(key)
    kind, _ = kind_of(field)
    flag = flag_of(name)
    if kind is bool:
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=_help(field), show_default=False)
    else:
        option = typer.Option(flag, help=_help(field), metavar=_metavar(kind), show_default=False)
    annotation: Any = Annotated[(bool | None) if kind is bool else (str | None), option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(kind: Any) -> str:
    return _METAVARS.get(
        kind, "LIST" if get_origin(kind) is tuple else "MAPPING" if get_origin(kind) is dict else "TEXT"
    )


def _help(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    text = (field.description or "")[:1].upper() + (field.description or "")[1:]
    if default is None or default == () or default == {}:
        return f"{text}."
    return f"{text}. [default: {str(default).lower() if isinstance(default, bool) else default}]"
