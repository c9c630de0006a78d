"""Files that a command writes: checked before the work, and overwritten only after confirmation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from sagellm.core import ConfigError

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Overwrite files that exist without asking.")]


def check_targets(*paths: Path | None, overwrite: bool, source: Path | None = None) -> None:
    """Raise ConfigError for a file that cannot be written, or exists and must be kept.

    Unless `overwrite` is true, asks on a terminal whether to overwrite, and refuses elsewhere. The command's
    input, `source`, is never overwritten, and no two results may go to one file.
    """
    targets = [path for path in paths if path is not None]
    for index, path in enumerate(targets):
        _check_place(path)
        if source is not None and _is_same_file(path, source):
            raise ConfigError(f"{path} is the file that is read; name another one for what is written")
        if any(_is_same_file(path, other) for other in targets[:index]):
            raise ConfigError(f"{path} is named for two results; name a file for each")
    for path in targets:
        _check_overwriting(path, overwrite=overwrite)


def confirm_overwriting(what: str, *, kind: str = "file") -> None:
    """Ask on a terminal whether to overwrite something that exists; elsewhere raise ConfigError."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{what} exists; name another {kind}, or overwrite it with --overwrite")
    typer.confirm(f"{what} exists; overwrite it?", abort=True, err=True)


def _check_place(path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder; name a file in it")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: the folder {folder} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


def _is_same_file(one: Path, other: Path) -> bool:
    """Compare two names of files that need not exist; False for pipes and devices, which lose nothing."""
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()


def _check_overwriting(path: Path, *, overwrite: bool) -> None:
    if not overwrite and path.is_file():  # a pipe or a device is not lost when it is written
        confirm_overwriting(str(path))
