"""One flag per field of `SamplingParams` that is useful at a terminal."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_origin

import typer

from sagellm.core import ConfigError
from sagellm.core.plugins.option_text import read_value
from sagellm.engines.cli.flags import command_help, make_flag, switch
from sagellm.engines.config.shown import shown
from sagellm.engines.sampling.checks import Parameter
from sagellm.engines.sampling.params import PARAMETERS, SamplingParams

DEFAULT_MAX_TOKENS = 256

_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)} | {
    "max_tokens": DEFAULT_MAX_TOKENS
}

_GROUP = "Sampling"
_METAVARS = {int: "INT", list[int]: "INT", float: "FLOAT", dict: "MAPPING"}


def _option(name: str, kind: Any, help_text: str) -> Any:
    if kind is bool:
        return switch(name, help_text, group=_GROUP)
    flags = ("-n", "--n") if name == "n" else (f"--{name.replace('_', '-')}",)
    return typer.Option(
        *flags,
        help=help_text,
        metavar=_METAVARS.get(kind, "TEXT"),
        show_default=False,
        rich_help_panel=_GROUP,
    )


def _default(name: str) -> object:
    """The value without the flag; for some fields the checkpoint decides."""
    default = _DEFAULTS[name]
    return f"the checkpoint's, or {default}" if PARAMETERS[name].is_of_checkpoint else default


def _flag(name: str, each: Parameter) -> inspect.Parameter:
    repeats = "; may be given more than once" if get_origin(each.type) is list else ""
    option = _option(name, each.type, command_help(f"{each.help}{repeats}", _default(name)))
    return make_flag(name, str if each.type is dict else each.type, option)


SAMPLING_FLAGS = tuple(_flag(name, each) for name, each in PARAMETERS.items())
SAMPLING_NAMES = frozenset(PARAMETERS)


def check_ranges(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number out of the range that requests to a server have too."""
    for name, value in given.items():
        each = PARAMETERS[name]
        if each.type not in (int, float):
            continue
        high = each.body_high or each.high
        if (each.low <= value if each.includes_low else each.low < value) and value <= high:
            continue
        kind, form = ("an integer", "d") if each.type is int else ("a number", ".15g")
        low = f"from {each.low:{form}} to" if each.includes_low else f"above {each.low:{form}} and at most"
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} is {value:{form}}; it must be {kind} {low} {high:{form}}")


def read_mapping(name: str, text: str) -> dict[str, Any]:
    """Read the text of a flag that takes a mapping, written as options are. Raises ConfigError."""
    flag = f"--{name.replace('_', '-')}"
    try:
        value = read_value(text)
    except ConfigError as error:
        raise ConfigError(f"{flag} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is {shown(text)}; it must be a mapping, as in '{{name: 3}}'")
    return value
