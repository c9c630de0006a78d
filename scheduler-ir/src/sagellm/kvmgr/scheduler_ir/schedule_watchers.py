"""Watchers of a scheduler's passes that print what they decide, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TextIO

from sagellm.core.protocols.scheduler_ir import PassWatcher, ScheduleIR
from sagellm.kvmgr.scheduler_ir.schedule_text import schedule_to_text


def emit_ir(stream: TextIO | None = None) -> PassWatcher:
    """Return a watcher that prints the whole schedule after each pass; to standard error by default."""

    def print_schedule(name: str, before: ScheduleIR, after: ScheduleIR) -> None:
        del before
        _print(f"// after {name}\n{schedule_to_text(after)}", stream)

    return print_schedule


def print_changed(stream: TextIO | None = None) -> PassWatcher:
    """Return a watcher that prints each pass's decisions; to standard error by default."""

    def print_decisions(name: str, before: ScheduleIR, after: ScheduleIR) -> None:
        del name  # each decision has it
        for decision in after.decisions[len(before.decisions) :]:
            _print(f"step {after.step}: {decision}", stream)

    return print_decisions


PASS_WATCHERS: Mapping[str, Callable[[], PassWatcher]] = {"changed": print_changed, "ir": emit_ir}
"""What the setting `scheduler.print` may name besides `none`."""


def _print(text: str, stream: TextIO | None) -> None:
    """Print, unless the stream is closed or its disk is full: that must not end a step."""
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr)
