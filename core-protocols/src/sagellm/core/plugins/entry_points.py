"""Finds the entry points of installed distributions.

importlib.metadata does the same, but its import and its parser take 17 ms of the 100 that a command may take
to print its help, so the few lines that are wanted are read here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_INFO = (".dist-info", ".egg-info")
_METADATA = ("METADATA", "PKG-INFO")


class EntryPoint(NamedTuple):
    """A module that a distribution names in a group. The distribution's name is normalised."""

    distribution: str
    version: str
    module: str


def entry_points(group: str) -> list[EntryPoint]:
    """Return those of a group, by distribution; where the path has a distribution twice, its first counts."""
    found: dict[tuple[str, str], EntryPoint] = {}
    for info in _infos():
        try:
            modules = _modules((info / "entry_points.txt").read_text(encoding="utf-8"), group)
        except (OSError, ValueError):
            continue
        name, version = _identity(info) if modules else ("", "")
        for module in modules:
            found.setdefault((name, module), EntryPoint(name, version, module))
    return [found[key] for key in sorted(found)]


def normalise(name: str) -> str:
    """Return the form of a distribution's name in which all its spellings are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _infos() -> Iterator[Path]:
    for folder in dict.fromkeys(sys.path):
        try:
            with os.scandir(folder or ".") as entries:
                names = sorted(entry.name for entry in entries if entry.name.endswith(_INFO))
        except OSError:
            continue
        yield from (Path(folder, name) for name in names)


def _modules(text: str, group: str) -> list[str]:
    """Return the values of a section, without attributes and extras."""
    modules, is_wanted = [], False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            is_wanted = line == f"[{group}]"
        elif is_wanted and "=" in line and line[0] not in "#;":
            modules.append(line.partition("=")[2].partition("[")[0].partition("#")[0].strip())
    return modules


def _identity(info: Path) -> tuple[str, str]:
    """Return name and version; either may be missing if the metadata is damaged."""
    headers = ""
    for name in _METADATA:
        try:
            headers = (info / name).read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
            break
        except OSError:
            continue
    values = dict(re.findall(r"^(Name|Version):[ \t]*(.*\S)", headers, re.MULTILINE))
    return normalise(values.get("Name", "unnamed")), values.get("Version", "unknown")
