"""Finds the method of a plugin in which a process hangs, from the stacks of its threads."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

from sagellm.core import errors

_KIT_FOLDER = Path(__file__).resolve().parents[1]
_KIT = str(_KIT_FOLDER)
_OURS = (_KIT, str(Path(errors.__file__).resolve().parent))
_WRAPPERS = (str(_KIT_FOLDER / "calls.py"), str(_KIT_FOLDER / "conformance" / "exercised.py"))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class Hang(NamedTuple):
    """Where a process hangs: the method that the kit called, if any, and the line reached."""

    method: str | None
    place: str  # policies.py, line 12, in victim


class _Frame(NamedTuple):
    file: str
    line: str
    name: str

    @property
    def is_foreign(self) -> bool:
        """Neither the kit's, nor core's, nor pytest's, nor the standard library's."""
        is_library = self.file.startswith(_STANDARD_LIBRARY) and "site-packages" not in self.file
        return not (is_library or self.file.startswith((*_OURS, "<")) or "/_pytest/" in self.file)


def find_hang(dump: str) -> Hang | None:
    """Find the hung call in faulthandler's output; None if no code of a plugin is running."""
    threads = [
        _frames(part) for part in re.split(r"^(?:Current thread|Thread) ", dump, flags=re.MULTILINE)[1:]
    ]
    for frames in threads:
        found = _called_by_kit(frames)
        if found is not None:
            return found
    for frames in threads:
        innermost = next((frame for frame in frames if frame.is_foreign), None)
        if innermost is not None and "/pluggy/" not in innermost.file:
            return Hang(None, _place(innermost))
    return None


def _frames(thread: str) -> list[_Frame]:
    """Return the frames of a thread, the innermost first, without the wrappers that count calls."""
    found = [_Frame(match["file"], match["line"], match["name"]) for match in _FRAME.finditer(thread)]
    return [frame for frame in found if frame.file not in _WRAPPERS]


def _called_by_kit(frames: list[_Frame]) -> Hang | None:
    kit = next((index for index, frame in enumerate(frames) if frame.file.startswith(_KIT)), 0)
    if not kit or not frames[kit - 1].is_foreign:
        return None
    innermost = next(frame for frame in frames[:kit] if frame.is_foreign)
    return Hang(frames[kit - 1].name, _place(innermost))


def _place(frame: _Frame) -> str:
    return f"{Path(frame.file).name}, line {frame.line}, in {frame.name}"
