"""Gives a command flags from a table instead of its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from sagellm.core import ProviderSpec


def make_flag(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Make a flag that is None unless it is given. `option` is a `typer.Option`."""
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_flags(*tables: Sequence[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose `**options` receives those flags of the tables that the user set.

    A flag that the command itself or an earlier table has is left out.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        own = frozenset(parameters)
        for flag in (flag for table in tables for flag in table):
            parameters.setdefault(flag.name, flag)

        def run(**given: Any) -> None:
            command(**{name: value for name, value in given.items() if name in own or value is not None})

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        return run

    return decorate


def command_help(text: str, default: object = None) -> str:
    """Write a flag's help: a sentence, and its default if it has one; `null` occurs only in files."""
    text, _, without = text.partition("; null: ")
    default = without if default is None and without else default
    sentence = f"{text[:1].upper()}{text[1:]}."
    if default is None or default == ():
        return sentence
    default = default.plain() if isinstance(default, ProviderSpec) else default
    return f"{sentence} [default: {str(default).lower() if isinstance(default, bool) else default}]"


def switch(name: str, help_text: str, *also: str, group: str | None = None) -> Any:
    """Make an option that can be turned on and off; `also` are further spellings."""
    dashed = name.replace("_", "-")
    spellings = (f"--{dashed}/--no-{dashed}", *also)
    return typer.Option(*spellings, help=help_text, show_default=False, rich_help_panel=group)
