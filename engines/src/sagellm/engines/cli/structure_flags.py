"""Flags that say what an answer must match."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.flags import make_flag
from sagellm.engines.cli.streams import as_text
from sagellm.engines.sampling.structured_outputs import StructuredOutputs

_GROUP = "Structured output"


def _option(name: str, help_text: str, metavar: str) -> Any:
    return typer.Option(name, help=help_text, metavar=metavar, show_default=False, rich_help_panel=_GROUP)


STRUCTURE_FLAGS = (
    make_flag(
        "json_schema",
        str,
        _option("--json-schema", "A file with the JSON schema of the answer, or the schema.", "FILE"),
    ),
    make_flag("regex", str, _option("--regex", "A regular expression for the whole answer.", "TEXT")),
    make_flag(
        "choice",
        list[str],
        _option("--choice", "A text that the answer may be; may be given more than once.", "TEXT"),
    ),
)
_NAMES = frozenset(flag.name for flag in STRUCTURE_FLAGS)


def split_structure(options: Mapping[str, Any]) -> tuple[StructuredOutputs | None, dict[str, Any]]:
    """Return what an answer must match, None if it may be anything, and the other options.

    Raises ConfigError for a file that cannot be read, and for two of these flags.
    """
    given = {name: value for name, value in options.items() if name in _NAMES}
    others = {name: value for name, value in options.items() if name not in _NAMES}
    if not given:
        return None, others
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags} are given; an answer can match only one of them")
    if "json_schema" in given:
        given["json"] = _schema(given.pop("json_schema"))
    if "choice" in given:
        given["choice"] = list(map(as_text, given["choice"]))
    return StructuredOutputs(**given), others


def _schema(given: str) -> str:
    if given.lstrip().startswith("{"):
        return as_text(given)
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--json-schema is {given!r}, which cannot be read: {error}; name a file, or give the schema"
        ) from error
