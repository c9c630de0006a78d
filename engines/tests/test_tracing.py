"""Chrome traces: complete, ordered, balanced, and exact after days of running."""

import json
import os
import resource
import stat
import threading
from contextlib import contextmanager
from decimal import Decimal

import pytest

from sagellm.core import SystemClock, VirtualClock
from sagellm.engines.tracing import ChromeTraceWriter, NullTrace

DAY_NS = 86_400 * 10**9


def load(path):
    return json.loads(path.read_text(), parse_float=Decimal)


def events(path, *phases):
    return [event for event in load(path) if event["ph"] in phases]


def test_a_past_span_has_its_own_time(tmp_path):
    clock = VirtualClock()
    path = tmp_path / "trace.json"
    with ChromeTraceWriter(path, clock) as trace, trace.span("forward"):
        clock.advance_ns(5_000)
        trace.past_span("qkv", clock.now_ns() - 3_001, clock.now_ns() - 1_000)
    (event,) = events(path, "X")
    assert (event["name"], event["ts"], event["dur"]) == ("qkv", Decimal("1.999"), Decimal("2.001"))
    (begun,), (ended,) = events(path, "B"), events(path, "E")
    assert begun["ts"] < event["ts"] < event["ts"] + event["dur"] < ended["ts"]
    assert begun["tid"] == event["tid"]


def check_balance(trace):
    """Every thread's spans nest, and each one that begins ends. Returns how many there were."""
    open_spans, num_spans = {}, 0
    for event in trace:
        stack = open_spans.setdefault(event["tid"], [])
        if event["ph"] == "B":
            stack.append(event["name"])
            num_spans += 1
        elif event["ph"] == "E":
            assert stack.pop() == event["name"]
    assert not any(open_spans.values())
    return num_spans


def test_eight_threads_over_thirty_days_give_a_valid_ordered_and_complete_file(tmp_path):
    path = tmp_path / "trace.json"
    clock, tick = VirtualClock(start_ns=123_456_789), threading.Lock()
    writer = ChromeTraceWriter(path, clock, buffer_bytes=4096)
    num_threads, num_steps = 8, 400
    step_ns = 30 * DAY_NS // (num_threads * num_steps) + 1

    def work(index):
        for step in range(num_steps):
            with tick:
                clock.advance_ns(step_ns)
            with writer.span("step", step=step, worker=index):
                with writer.span("prefill"):
                    writer.counter("tokens", running=step)
                writer.instant("done")

    threads = [threading.Thread(target=work, args=(index,), name=f"worker-{index}") for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()

    trace = load(path)
    times = [event["ts"] for event in trace]
    assert times == sorted(times)
    assert times[-1] * 1000 == num_threads * num_steps * step_ns  # not a nanosecond lost
    assert times[-1] * 1000 > 30 * DAY_NS
    assert check_balance(trace) == num_threads * num_steps * 2
    seen = {
        (event["args"]["worker"], event["args"]["step"])
        for event in trace
        if "worker" in event.get("args", {})
    }
    assert seen == {(worker, step) for worker in range(num_threads) for step in range(num_steps)}
    assert len(events(path, "C")) == num_threads * num_steps
    names = {event["tid"]: event["args"]["name"] for event in events(path, "M")}
    assert sorted(name for name in names.values() if name.startswith("worker")) == [
        f"worker-{i}" for i in range(8)
    ]
    for event in trace:
        if "worker" in event.get("args", {}):
            assert names[event["tid"]] == f"worker-{event['args']['worker']}"


def test_timestamps_keep_their_nanoseconds_after_a_century(tmp_path):
    path, clock = tmp_path / "trace.json", VirtualClock()
    with ChromeTraceWriter(path, clock) as writer:
        clock.advance_ns(36_525 * DAY_NS + 7)
        writer.instant("late")
        clock.advance_ns(1)
        writer.instant("a nanosecond later")
    late, later = events(path, "i")[1:]
    assert late["ts"] == Decimal(36_525 * DAY_NS + 7) / 1000
    assert later["ts"] - late["ts"] == Decimal("0.001")


def test_time_counts_from_the_beginning_of_the_trace_and_wall_time_is_a_label(tmp_path):
    path = tmp_path / "trace.json"
    ChromeTraceWriter(path, VirtualClock(start_ns=10**18, wall_start_s=1.5e9)).close()
    (start,) = events(path, "i")
    assert start["ts"] == 0
    assert start["args"]["wall_s"] == 1.5e9


def test_a_file_is_complete_after_every_write(tmp_path):
    path = tmp_path / "trace.json"
    writer = ChromeTraceWriter(path, VirtualClock())
    assert [event["name"] for event in events(path, "i")] == ["trace started"]
    with writer.span("prefill", num_tokens=5):
        writer.flush()
        assert load(path)[-1]["args"] == {"num_tokens": 5}
        first, *lines, last = path.read_text().splitlines()
        assert (first, last) == ("[", "]")
        assert [json.loads(line.removesuffix(",")) for line in lines], "one event a line"
    writer.close()
    assert check_balance(load(path)) == 1


@contextmanager
def disk_of(num_bytes):
    """Let no file grow beyond this size: a write is cut there, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_some(path, buffer_bytes):
    with ChromeTraceWriter(path, VirtualClock(), buffer_bytes=buffer_bytes) as writer:
        for number in range(3):
            with writer.span("step", number=number):
                writer.counter("a, b", running=number)


@pytest.mark.parametrize("buffer_bytes", [1, 500, 1 << 16])
def test_a_disk_that_fills_up_leaves_whole_events_in_a_complete_file_and_is_told_once(
    tmp_path, caplog, buffer_bytes
):
    path = tmp_path / "trace.json"
    write_some(path, buffer_bytes)
    whole, size = load(path), path.stat().st_size
    num_kept = set()
    for limit in [*range(0, size - 20, 7), *range(size - 20, size)]:
        caplog.clear()
        with disk_of(limit):
            write_some(path, buffer_bytes)
        assert path.stat().st_size <= limit
        assert caplog.text.count("the trace ends here: writing to its file failed") == 1
        kept = load(path) if path.stat().st_size else []
        assert kept == whole[: len(kept)]
        assert kept or limit < 250
        num_kept.add(len(kept))
    assert num_kept >= set(range(2, len(whole)))
    with disk_of(size):
        write_some(path, buffer_bytes)
    assert load(path) == whole


def test_a_pipe_gets_the_events_as_they_come_and_the_end_at_the_end(tmp_path):
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    write_some(path, 1)
    reader.join(10)
    assert check_balance(json.loads(got[0])) == 3


def test_memory_is_bounded_by_the_buffer(tmp_path):
    path = tmp_path / "trace.json"
    writer = ChromeTraceWriter(path, VirtualClock(), buffer_bytes=1000)
    for number in range(1000):
        with writer.span("step", number=number):
            assert writer._num_buffered < 1000 + 200
    assert path.stat().st_size > 50_000
    assert not writer._open_spans
    writer.close()


def test_an_empty_trace_is_valid(tmp_path):
    path = tmp_path / "trace.json"
    ChromeTraceWriter(path, SystemClock()).close()
    assert load(path)


def test_close_ends_open_spans_and_later_calls_do_nothing(tmp_path):
    path = tmp_path / "trace.json"
    writer = ChromeTraceWriter(path, VirtualClock())
    outer = writer.span("outer")
    with outer, writer.span("inner"):
        writer.close()
        writer.instant("too late")
        with writer.span("too late"):
            writer.flush()
    writer.close()
    assert [event["name"] for event in events(path, "B", "E")] == ["outer", "inner", "inner", "outer"]


def test_a_span_that_raises_ends_and_names_the_error(tmp_path):
    path = tmp_path / "trace.json"
    with ChromeTraceWriter(path, VirtualClock()) as writer, pytest.raises(KeyError), writer.span("step"):
        raise KeyError
    (end,) = events(path, "E")
    assert end["args"] == {"error": "KeyError"}


def test_a_span_left_by_another_thread_ends_on_its_own(tmp_path):
    path = tmp_path / "trace.json"
    with ChromeTraceWriter(path, VirtualClock()) as writer:
        span = writer.span("handed over")
        span.__enter__()
        thread = threading.Thread(target=span.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
    begin, end = events(path, "B", "E")
    assert begin["tid"] == end["tid"]


def test_a_renamed_thread_is_named_again_and_a_new_one_gets_a_new_number(tmp_path):
    path = tmp_path / "trace.json"
    with ChromeTraceWriter(path, VirtualClock()) as writer:
        for index in range(20):  # the system is free to use one thread id twenty times
            thread = threading.Thread(target=writer.instant, args=("hello",), name=f"short-{index}")
            thread.start()
            thread.join()

        def rename():
            writer.instant("before")
            threading.current_thread().name = "after"
            writer.instant("after")

        thread = threading.Thread(target=rename, name="before")
        thread.start()
        thread.join()
    names = [event["args"]["name"] for event in events(path, "M")]
    assert names[-2:] == ["before", "after"]
    assert len({event["tid"] for event in events(path, "i") if event["name"] == "hello"}) == 20


def test_odd_names_and_values_stay_valid_json(tmp_path):
    path = tmp_path / "trace.json"
    with ChromeTraceWriter(path, VirtualClock()) as writer:
        writer.instant(
            'quote " \\ \n \x00 é 漢 \ud800', name="x", nan=float("nan"), inf=float("inf"), none=None
        )
        writer.instant("object", value=threading, flag=True)
    odd = events(path, "i")[1]
    assert odd["name"].startswith('quote " \\ \n \x00 é 漢')
    assert odd["args"] == {"name": "x", "nan": "nan", "inf": "inf", "none": None}


def test_only_the_owner_may_read_the_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old content, readable by all")
    path.chmod(0o644)
    ChromeTraceWriter(path, VirtualClock()).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else(caplog, monkeypatch):
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    writer = ChromeTraceWriter("/dev/full", VirtualClock())
    with writer.span("step"):
        writer.flush()
    writer.instant("after")
    writer.close()
    assert caplog.text.count("the trace ends here") == 1


def test_the_null_trace_takes_every_call():
    trace = NullTrace()
    with trace.span("step", number=1), trace.span("inner"):
        trace.instant("now")
        trace.counter("tokens", running=3)
    trace.flush()
    trace.close()
