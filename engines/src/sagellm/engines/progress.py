"""A progress bar on terminals, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(label: str, *, total: int, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Show a bar on standard error and yield the function that moves it on.

    Does nothing when disabled or when standard error is no terminal.
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)
