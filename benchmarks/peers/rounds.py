"""Times calls, here and in a peer's interpreter alike; needs the standard library alone."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


def _nothing(_: Any = None) -> None:
    """Prepare and undo nothing."""


@dataclass(frozen=True)
class Case:
    """One row at one size: what is timed, what makes its argument, and what undoes it. Only `call` counts."""

    call: Callable[[Any], Any]
    before: Callable[[], Any] = _nothing
    after: Callable[[Any], Any] = _nothing


Rows = Mapping[str, Callable[[int], Case]]
"""By the name of a row, how its case is made for a size; each row that a subject has."""


def rows_of(subject: Any) -> Rows:
    """Return the rows of a subject: one for each method that it has, and three of its `evict`."""
    methods = {
        row: row.replace(" + ", "_and_")
        for row in ("match", "miss", "key", "key + match", "allocate", "free")
    }
    rows = {row: getattr(subject, name) for row, name in methods.items() if hasattr(subject, name)}
    for row, num_blocks, leaf_blocks in (
        ("evict 1", 1, 1),
        ("evict 512", 512, 1),
        ("evict 512 of 32", 512, 32),
    ):
        rows[row] = partial(subject.evict, num_blocks, leaf_blocks=leaf_blocks)
    return rows


class Subject:
    """One implementation under the same rows as the others."""

    def __init__(self, implementation: Any) -> None:
        self._rows = rows_of(implementation)
        self._cases: dict[tuple[str, int], Case] = {}

    def measure(self, row: str, size: int, num_calls: int, limit_s: float) -> list[int] | None:
        """Return what calls took in ns, fewer where they do not end in time; None for a row it has not.

        The first measurement of a case makes it and warms it up.
        """
        if row not in self._rows:
            return None
        if (row, size) not in self._cases:
            self._cases[row, size] = case = self._rows[row](size)
            _time(case, max(1, num_calls // 10), limit_s / 10)
            gc.collect()
            gc.freeze()  # what stays is not searched again in the midst of a call
        return _time(self._cases[row, size], num_calls, limit_s)


def _time(case: Case, num_calls: int, limit_s: float) -> list[int]:
    now_ns = time.perf_counter_ns
    before, call, after = case.before, case.call, case.after
    took: list[int] = []
    end_ns = now_ns() + round(limit_s * 1e9)
    for _ in range(num_calls):
        argument = before()
        started = now_ns()
        result = call(argument)
        ended = now_ns()
        took.append(ended - started)
        after(result)
        if ended > end_ns:
            break
    return took


def answer(make: Callable[[], tuple[Callable[..., Any], dict[str, str]]]) -> None:
    """Make a function, say about it what there is to say, and answer each line of JSON with its result.

    Whatever the peer prints goes to standard error.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    call, about = make()
    print(json.dumps(about), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(call(*json.loads(line))), file=channel, flush=True)
    os._exit(0)  # without the complaints that compiled modules make when an interpreter is taken down
