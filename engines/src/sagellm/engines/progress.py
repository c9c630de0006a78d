"""Progress of long work, on standard error: a bar, or a line now and then if not on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TextIO

from sagellm.core import RequestId

PLAIN_INTERVAL_S = 5.0
"""Seconds between two lines where there is no bar."""

Advance = Callable[[float], None]
"""Advances progress by an amount, in the unit of the total."""


@contextmanager
def progress_bar(label: str, *, total: int, unit: str = "", enabled: bool = True) -> Iterator[Advance]:
    """Show progress towards `total` and yield the function that advances it.

    A bar on terminals, and in notebooks that have widgets; elsewhere a line every `PLAIN_INTERVAL_S`
    seconds, so short work prints nothing. `unit` is what a line counts: "tokens", "bytes".
    """
    if not enabled:
        yield lambda amount: None
    elif _shows_bars():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(label, total=total)
            yield lambda amount: progress.advance(task, amount)
    else:
        lines = _PlainLines(label, total, unit, sys.stderr)
        lines.start()
        is_done = False
        try:
            yield lines.advance
            is_done = True
        finally:
            lines.stop(is_done=is_done)


def _shows_bars() -> bool:
    """Say whether rich can draw bars: in a notebook only with widgets; without, it keeps warning."""
    return sys.stderr.isatty() or ("ipykernel" in sys.modules and find_spec("ipywidgets") is not None)


class _PlainLines:
    """A thread that reports how far the work is, even while one piece of it takes long."""

    def __init__(self, label: str, total: int, unit: str, stream: TextIO) -> None:
        self._label, self._total, self._unit, self._stream = label, total, unit, stream
        self._done = 0.0
        self._started_s = time.monotonic()
        self._is_silent = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sagellm-progress", daemon=True)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def advance(self, amount: float) -> None:
        """Count what has been done."""
        self._done += amount

    def stop(self, *, is_done: bool) -> None:
        """Stop writing; add a last line if there were earlier ones."""
        self._ended.set()
        self._thread.join()
        if is_done and not self._is_silent:
            self._write(f"{self._label}: done in {self._elapsed_s:.0f} s")

    def _run(self) -> None:
        while not self._ended.wait(PLAIN_INTERVAL_S):
            self._is_silent = False
            self._write(self._line())

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _line(self) -> str:
        elapsed_s, done, total = self._elapsed_s, self._done, self._total
        if total <= 0:
            return f"{self._label}: {elapsed_s:.0f} s"
        left = f", about {elapsed_s * (total - done) / done:.0f} s left" if 0 < done < total else ""
        counted = "" if self._unit == "bytes" else f" ({done:,.0f} of {total:,} {self._unit}".rstrip() + ")"
        return f"{self._label}: {min(1.0, done / total):.0%}{counted}, {elapsed_s:.0f} s{left}"

    def _write(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except (OSError, ValueError):  # the stream is closed
            self._ended.set()


class RequestShares:
    """Adds up the progress of requests; one that ends early counts as its full share.

    `shares` are tokens by request. `take` costs a few dictionary lookups, `show` as much as `advance`: call
    it once per step.
    """

    def __init__(self, shares: Mapping[RequestId, int], advance: Advance) -> None:
        self._shares = shares
        self._done = dict.fromkeys(shares, 0)
        self._advance = advance
        self._num_new = 0

    def take(self, request: RequestId, num_tokens: int, *, is_finished: bool) -> None:
        """Set how many tokens of a request are done so far. Requests without a share do not count."""
        if (share := self._shares.get(request)) is None:
            return
        done = share if is_finished else min(share, num_tokens)
        self._num_new += done - self._done[request]
        self._done[request] = done

    def show(self) -> None:
        """Advance the progress by the amount taken since the last call."""
        if self._num_new:
            self._advance(self._num_new)
            self._num_new = 0
