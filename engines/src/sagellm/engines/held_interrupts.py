"""Ctrl-C waits for the end of a step, and SIGTERM ends a block as Ctrl-C does."""

from __future__ import annotations

import _signal as signals  # type: ignore[import-not-found]  # `signal` makes enums of it, in 16 µs a block
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

_SIGINT = signals.SIGINT


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt in a block, as SIGINT does, while no event loop runs."""
    before = signals.signal(signals.SIGTERM, signals.default_int_handler)
    try:
        yield
    finally:
        signals.signal(signals.SIGTERM, before)


class HeldInterrupts:
    """Holds back Ctrl-C in a block, at whose end KeyboardInterrupt is raised, after what the block raises.

    A second Ctrl-C is raised at once, to get out of a step that hangs. It holds only Python's own
    handler of SIGINT, which is back after the block, and only in the main thread: no other gets
    KeyboardInterrupt. Within another block it does nothing, so the outermost one raises. Takes 1 µs.
    """

    __slots__ = ("_is_ours", "is_pending")

    def __init__(self) -> None:
        self.is_pending = False
        self._is_ours = False

    def __enter__(self) -> Self:
        if (
            signals.getsignal(_SIGINT) is signals.default_int_handler
            and threading.get_ident() == threading.main_thread().ident
        ):
            signals.signal(_SIGINT, self._hold)
            self._is_ours = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_ours:
            if signals.getsignal(_SIGINT) == self._hold:  # not if the block has set another
                signals.signal(_SIGINT, signals.default_int_handler)
            if kind is not KeyboardInterrupt:
                self.raise_pending()

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt within the block if Ctrl-C was pressed."""
        if self.is_pending:
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Say whether Ctrl-C was pressed, which is dealt with by that and no longer raised."""
        is_pending, self.is_pending = self.is_pending, False
        return is_pending

    def _hold(self, *_: object) -> None:
        if self.is_pending:
            signals.signal(_SIGINT, signals.default_int_handler)
            raise KeyboardInterrupt
        self.is_pending = True
