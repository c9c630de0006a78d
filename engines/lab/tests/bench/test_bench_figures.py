"""Figures follow core's formulas; results are saved, read and compared."""

from __future__ import annotations

from array import array

import pytest

from sagellm.core import ConfigError
from sagellm.engines.metrics.latency import (
    goodput,
    itl_s,
    percentile,
    throughput,
    total_throughput,
    tpot_s,
    ttft_s,
)
from sagellm.lab.bench import Limits, compare_results, spread
from sagellm.lab.bench.answer import EventSplitter
from sagellm.lab.bench.driver import LoadRun
from sagellm.lab.bench.figures import serve_figures
from sagellm.lab.bench.http_reader import ResponseReader
from sagellm.lab.bench.records import RequestFailedError, RequestRecord
from sagellm.lab.bench.results import load_result, make_result, request_rows, save_result

MS = 1_000_000


def record(arrival_ms, event_times_ms, *, num_tokens=None, num_asked=3, error=None):
    made = RequestRecord(
        arrival_ns=arrival_ms * MS,
        num_asked_tokens=num_asked,
        num_prompt_tokens=10,
        end_ns=(event_times_ms[-1] + 1) * MS,
        event_times_ns=array("q", [one * MS for one in event_times_ms]),
        num_reported_tokens=num_tokens,
    )
    if error:
        made.fail(RequestFailedError(error, "because"))
    return made


@pytest.fixture
def run():
    records = [
        record(0, [50, 60, 80]),
        record(10, [110, 150], num_tokens=5),
        record(20, [200], num_tokens=1),
        record(30, [40, 41], error="cut"),
    ]
    return LoadRun(records=records, start_ns=0, end_ns=201 * MS, max_running=4, late_s=[])


def test_figures_are_those_of_cores_formulas(run):
    figures = serve_figures(run, Limits(ttft_ms=100, tpot_ms=12))
    good = run.records[:3]
    times = [one.times for one in good]
    clock = {"start_ns": 0, "end_ns": 201 * MS}
    ttfts = [ttft_s(one.arrival_ns, one.first_token_ns) * 1e3 for one in times]
    tpots = [tpot_s(one.first_token_ns, one.last_token_ns, one.num_output_tokens) for one in times]
    gaps = [gap * 1e3 for one in good for gap in itl_s(one.event_times_ns)]
    assert ttfts == pytest.approx([50, 100, 180])
    assert figures.ttft_ms == spread(ttfts)
    assert tpots == [0.015, 0.01, None]
    assert figures.tpot_ms == spread([15.0, 10.0])
    assert figures.itl_ms == spread(gaps)
    assert figures.itl_ms.p99 == pytest.approx(percentile([10, 20, 40], 99))
    assert figures.e2e_ms.max == pytest.approx(181)
    assert figures.output_throughput_tokens_per_s == throughput(9, **clock)
    assert figures.total_throughput_tokens_per_s == total_throughput(30, 9, **clock)
    assert figures.goodput_requests_per_s == goodput(times, max_ttft_s=0.1, max_tpot_s=0.012, **clock)
    assert figures.goodput_requests_per_s == pytest.approx(1 / 0.201)


def test_failures_bring_no_tokens_and_no_times(run):
    figures = serve_figures(run)
    assert (figures.num_requests, figures.num_succeeded, figures.num_failed) == (4, 3, 1)
    assert (figures.num_output_tokens, figures.num_prompt_tokens, figures.ttft_ms.count) == (9, 30, 3)
    assert (figures.errors["cut"].count, figures.errors["cut"].example) == (1, "because")
    assert figures.goodput_requests_per_s is None
    assert figures.num_shorter_than_asked == 1


def test_text_that_was_held_back_is_seen_with_the_end():
    held = RequestRecord(
        arrival_ns=0, num_asked_tokens=2, num_prompt_tokens=1, finish_ns=7 * MS, num_reported_tokens=2
    )
    assert (held.times.first_token_ns, held.times.last_token_ns) == (7 * MS, 7 * MS)


def test_a_spread_of_nothing_is_nothing():
    assert spread([]) is None
    one = spread([5.0])
    assert (one.min, one.mean, one.p99, one.max, one.count) == (5.0, 5.0, 5.0, 5.0, 1)


def test_a_result_is_read_as_it_was_saved(run, tmp_path):
    result = make_result("serve", {"rate": 2.0}, serve_figures(run), warnings=["w"])
    result["requests"] = request_rows(run)
    save_result(result, tmp_path / "r.json")
    assert load_result(tmp_path / "r.json") == result
    assert {"cpu", "flags", "python", "torch", "sagellm"} <= set(result["machine"])
    assert result["requests"]["first_token_ms"] == [50, 110, 200, None]
    assert result["requests"]["error"] == [None, None, None, "cut"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"figures": 3}'])
def test_what_is_no_result_is_told(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        load_result(tmp_path / "r.json")


def result_of(kind="serve", *, cpu="x", model="m", **figures):
    return {
        "benchmark": kind,
        "settings": {"rate": 2, "model": model},
        "machine": {"cpu": cpu},
        "figures": figures,
    }


def test_a_comparison_gives_ratios_to_the_first():
    first = result_of(speed=10.0, idle=0, ttft_ms={"median": 4.0, "count": 9})
    second = result_of(speed=25.0, idle=3, ttft_ms={"median": 2.0, "count": 9}, cpu="y", model="n")
    found = compare_results([first, second])
    shown = {one.name: (one.values, one.ratios) for one in found.figures}
    assert shown == {
        "speed": ((10.0, 25.0), (1.0, 2.5)),
        "idle": ((0.0, 3.0), (None, None)),
        "ttft_ms.median": ((4.0, 2.0), (1.0, 0.5)),
    }
    assert found.differences == ["machine.cpu: x | y"]


def test_what_cannot_be_compared_is_told():
    with pytest.raises(ConfigError, match="two results or more"):
        compare_results([result_of()])
    with pytest.raises(ConfigError, match="different benchmarks: serve, latency"):
        compare_results([result_of(), result_of("latency")])


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("response", "reusable"),
    [
        (
            HEAD + CHUNKED + b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nT: x\r\n\r\n",
            True,
        ),
        (HEAD + b"Content-Length: 11\r\n\r\nhello world", True),
        (HEAD.replace(b"1.1", b"1.0") + b"Content-Length: 11\r\n\r\nhello world", False),
        (HEAD + b"Connection: close\r\nContent-Length: 11\r\n\r\nhello world", False),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\nhello world", False),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_response_is_the_same_however_it_is_cut(response, reusable, size):
    reader = ResponseReader()
    body = b"".join(reader.feed(response[i : i + size]) for i in range(0, len(response), size))
    reader.end()
    assert (body, reader.status, reader.is_done, reader.may_be_reused) == (
        b"hello world",
        200,
        True,
        reusable,
    )


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"HTTP/1.1 200",
        HEAD + b"Content-Length: 11\r\n\r\nhello",
        HEAD + CHUNKED + b"5\r\nhello\r\n",
        HEAD + CHUNKED + b"5\r\nhello\r\n0\r\n",
    ],
)
def test_a_response_that_ends_too_early_is_cut(response):
    reader = ResponseReader()
    reader.feed(response)
    with pytest.raises(RequestFailedError, match="in the middle"):
        reader.end()


def test_a_chunk_without_a_size_is_refused():
    with pytest.raises(RequestFailedError, match="chunk size"):
        ResponseReader().feed(HEAD + CHUNKED + b"hello\r\n")


def test_events_are_split_at_blank_lines_whatever_ends_a_line():
    splitter = EventSplitter()
    pieces = [b"data: a", b"\n\ndata:b\r", b"\n\r\n: ping\n\n", b"event: x\ndata: c\ndata: d\n\n", b"data: e"]
    assert [event for piece in pieces for event in splitter.feed(piece)] == [b"a", b"b", b"c\nd"]
