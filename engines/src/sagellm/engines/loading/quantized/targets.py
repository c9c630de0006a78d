"""Which modules the targets of a config name, in time that a hostile pattern does not decide."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from sagellm.core import CheckpointError
from sagellm.engines.config.shown import shown

_MAX_NAME = 200
_MAX_PATTERN = 500
_MAX_REPEATS = 4  # one after the other; trying them all takes the length of a name to this power
_MAX_S = 10.0  # for all names of a checkpoint; usual ones take milliseconds
_ESCAPES_AND_CLASSES = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)[*+{]")


class TargetMatcher:
    """Matches names of modules with targets: the name itself, or a pattern after `re:`.

    Errors name the place `where` the targets are from.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where, self._known = where, dict[str, re.Pattern[str]]()
        self._clock, self._latest = clock, clock() + _MAX_S

    def matches(self, name: str, target: str) -> bool:
        """Say whether a target is for a module; a pattern from the first letter of its name.

        Raises CheckpointError for patterns that are not valid or may take long.
        """
        if not target.startswith("re:"):
            return target == name
        if target not in self._known:
            self._known[target] = self._compiled(target)
        if self._clock() > self._latest:
            raise self._error(target, f"takes too long: all targets together may take {_MAX_S:.0f} s")
        return self._known[target].match(name[:_MAX_NAME]) is not None

    def _compiled(self, target: str) -> re.Pattern[str]:
        pattern = target.removeprefix("re:")
        if len(pattern) > _MAX_PATTERN:
            raise self._error(target, f"is longer than {_MAX_PATTERN} characters")
        plain = _ESCAPES_AND_CLASSES.sub("x", pattern)
        if _REPEATED_GROUP.search(plain) or _most_repeats(plain) > _MAX_REPEATS:
            raise self._error(target, f"repeats a group, or more than {_MAX_REPEATS} times in a row")
        try:
            return re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._error(target, f"is not a valid pattern: {error}") from error

    def _error(self, target: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: the target {shown(target)} {problem}")


def _most_repeats(pattern: str) -> int:
    """Return how many repeats follow each other, in the alternative that has the most."""
    levels = [[0, 0]]  # of each open group: of its longest alternative so far, of the one that is read
    for character in pattern:
        if character == "(":
            levels.append([0, 0])
        elif character == "|":
            levels[-1] = [max(levels[-1]), 0]
        elif character == ")" and len(levels) > 1:
            longest = max(levels.pop())
            levels[-1][1] += longest
        elif character in "*+{":
            levels[-1][1] += 1
    return max(map(max, levels))
