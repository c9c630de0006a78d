"""Watchers that print what passes decide, whatever becomes of the stream."""

from __future__ import annotations

import io

import pytest

from sagellm.core import ConfigError
from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR
from sagellm.kvmgr.scheduler_ir.schedule_text import schedule_from_text, schedule_to_text
from sagellm.kvmgr.scheduler_ir.schedule_watchers import PASS_WATCHERS, emit_ir, print_changed

BEFORE = schedule_from_text(
    """\
step 3 at 1.500 s: available=7 tokens=64 seats=4 block=16
  pending 0 a tokens=33 computed=0 hit=0 priority=0
  pending 1 b tokens=40 computed=0 hit=16 priority=1
  first: cap pending 0-1 = 8"""
)
AFTER = BEFORE.order_pending([1, 0]).defer([0], "too long")


def test_only_the_decisions_of_the_pass_are_printed() -> None:
    stream = io.StringIO()
    print_changed(stream)("second", BEFORE, AFTER)
    assert stream.getvalue() == "step 3: order pending 1 0\nstep 3: defer pending 0 = too long\n"


def test_a_pass_that_decides_nothing_prints_nothing() -> None:
    stream = io.StringIO()
    print_changed(stream)("second", BEFORE, BEFORE)
    assert stream.getvalue() == ""


def test_the_whole_schedule_is_printed_after_each_pass_and_can_be_read_back() -> None:
    stream = io.StringIO()
    emit_ir(stream)("second", BEFORE, AFTER)
    head, text = stream.getvalue().split("\n", 1)
    assert head == "// after second"
    assert schedule_to_text(schedule_from_text(text)) == schedule_to_text(AFTER)


@pytest.mark.parametrize("name", PASS_WATCHERS)
def test_standard_error_is_the_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    PASS_WATCHERS[name]()("second", BEFORE, AFTER)
    told = capsys.readouterr()
    assert (told.out, "defer pending 0 = too long" in told.err) == ("", True)


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError("no space left on device")


def test_a_stream_that_is_closed_or_full_ends_no_step() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, Full()):
        print_changed(stream)("second", BEFORE, AFTER)
        emit_ir(stream)("second", BEFORE, AFTER)


def test_a_name_that_no_watcher_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no watcher is called 'none'; there are changed, ir"):
        BaseSchedulerIR().watch("none")
