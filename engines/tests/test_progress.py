"""Progress: tokens are counted, a log gets a line now and then, and a notebook is not flooded."""

from __future__ import annotations

import io
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import sagellm.engines.progress as module
from sagellm.core import RequestId
from sagellm.engines import SamplingParams
from sagellm.engines.progress import RequestShares, progress_bar
from sagellm.testing.patience import wait_until


@pytest.fixture
def soon(monkeypatch):
    """Have lines written often; the work takes as long as the test says."""
    monkeypatch.setattr(module, "PLAIN_INTERVAL_S", 0.05)
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=0.0)
    monkeypatch.setattr(module, "time", clock)
    return clock


def wait_for_lines(capsys, number):
    seen = []

    def have_come():
        seen.append(capsys.readouterr().err)
        return "".join(seen).count("\n") >= number

    wait_until(have_come)
    return "".join(seen)


def is_written():
    """Say whether a thread writes lines."""
    return "sagellm-progress" in [thread.name for thread in threading.enumerate()]


def test_without_a_terminal_long_work_writes_a_line_now_and_then(soon, capsys):
    with progress_bar("replaying", total=1200, unit="requests") as advance:
        soon.now_s = 10.0
        advance(300)
        wait_for_lines(capsys, 2)
        last = wait_for_lines(capsys, 1).splitlines()[-1]
        soon.now_s = 40.0
    assert last == "replaying: 25% (300 of 1,200 requests), 10 s, about 30 s left"
    assert capsys.readouterr().err.endswith("replaying: done in 40 s\n")


def test_short_work_and_work_that_is_not_to_be_shown_say_nothing(monkeypatch, capsys):
    with progress_bar("short", total=2) as advance:
        advance(2)
    monkeypatch.setattr(module, "PLAIN_INTERVAL_S", 0.001)
    with progress_bar("hidden", total=2, enabled=False) as advance:
        assert not is_written()
        advance(2)
    assert capsys.readouterr().err == ""


def test_work_that_fails_is_not_called_done(soon, capsys):
    def work():
        with progress_bar("loading", total=10, unit="bytes") as advance:
            advance(1)
            assert "loading: 10%, 0 s, about 0 s left\n" in wait_for_lines(capsys, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert "done" not in capsys.readouterr().err


def test_a_closed_standard_error_does_not_end_the_work(soon, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("work", total=1):
        stream.close()
        wait_until(lambda: not is_written())


def test_a_notebook_without_widgets_gets_lines_and_no_warnings(soon, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "ipywidgets" else find_spec(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with progress_bar("generating", total=100_000) as advance:
            started = time.monotonic()
            for _ in range(100_000):
                advance(1)
            seen = wait_for_lines(capsys, 2)
            elapsed_s = time.monotonic() - started
    assert 2 <= seen.count("\n") <= elapsed_s / 0.05 + 1


def test_a_terminal_gets_a_bar_that_goes(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("replaying", total=4) as advance:
        advance(1)
    seen = capsys.readouterr().err
    assert "replaying" in seen
    assert "25%" in seen


def test_a_request_that_ends_early_has_done_all_of_its_share():
    moves = []
    one, two, stranger = map(RequestId, ("one", "two", "stranger"))
    shares = RequestShares({one: 100, two: 50}, moves.append)
    shares.take(one, 30, is_finished=False)
    shares.take(stranger, 7, is_finished=False)
    shares.take(two, 10, is_finished=False)
    shares.show()
    shares.show()
    shares.take(one, 40, is_finished=True)
    shares.take(two, 60, is_finished=False)
    shares.show()
    assert moves == [40, 110]


def test_generating_counts_tokens_while_no_request_has_ended(make_engine, monkeypatch):
    moves = []

    def bar(label, *, total, unit, enabled):
        assert (label, total, unit, enabled) == ("generating", 2 * (3 + 8), "tokens", True)
        return nullcontext(moves.append)

    monkeypatch.setattr(module, "progress_bar", bar)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    make_engine(num_blocks=32).generate([[5, 6, 7], [8, 9, 10]], params, progress=True)
    assert moves == [8, *[2] * 7], "three tokens of each prompt and its first, then one of each a step"
