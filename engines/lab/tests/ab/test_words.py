"""Comparisons of two runs, and their verdicts in words."""

from __future__ import annotations

import re

import numpy as np
import pytest

from sagellm.lab.ab.bootstrap import BlockBootstrap, Difference, Estimate
from sagellm.lab.ab.comparison import Change, Comparison, Run, compare
from sagellm.lab.ab.metrics import SAVED, SERVING_METRICS
from sagellm.lab.ab.words import about, change_rows, change_text, figure_text, interval_text, verdict

TTFT = SERVING_METRICS[0]
TIMES = ("ttft_s", "tpot_s", "latency_s", "wait_s")


def run(name: str, values: np.ndarray, saved: float = 0.0) -> Run:
    size = len(values)
    columns = {each: values for each in TIMES} | {
        "good": np.ones(size),
        "saved": np.full(size, saved),
        "prompt": np.full(size, 100.0),
    }
    return Run(name=name, text=f"order={name}", columns=columns)


def judged(a: Run, b: Run, headline=TTFT) -> tuple[Comparison, str]:
    size = len(a.columns["ttft_s"])
    bootstrap = BlockBootstrap(np.arange(size))
    found = compare(a, b, SERVING_METRICS, bootstrap)
    return found, verdict(found, headline, bootstrap, size)


@pytest.fixture
def values():
    return np.random.default_rng(1).exponential(1.0, 400)


def test_equal_runs_are_identical(values):
    found, sentence = judged(run("a", values), run("b", values))
    assert found.is_identical
    assert sentence.startswith("b is identical to a: every request came out the same; where hardly any ")
    assert "--stretch 0.1 make a queue" in sentence


def test_a_clear_difference_is_said_without_signs(values):
    noise = np.random.default_rng(2).normal(0.97, 0.02, 400)
    _, sentence = judged(run("a", values), run("b", noise * values))
    assert sentence.startswith("b is 3.")
    assert sentence.endswith(" % faster in mean TTFT (95 %: 3.0 to 3.6 %)")
    _, sentence = judged(run("a", noise * values), run("b", values))
    assert sentence.endswith(" % slower in mean TTFT (95 %: 3.1 to 3.7 %)")


def test_a_large_difference_is_said_in_times(values):
    _, sentence = judged(run("a", values), run("b", 40 * values))
    assert sentence == "b takes 40.0 times as long in mean TTFT (95 %: 40.0 to 40.0 times)"


def test_no_difference_says_how_many_requests_would_show_one(values):
    noise = np.random.default_rng(3).normal(1.0, 0.5, 400)
    _, sentence = judged(run("a", values), run("b", noise * values))
    assert sentence.startswith("b: no sure difference in mean TTFT at this size: ")
    assert re.search(
        r"; about [\d,]+0 more requests would show one as large as this, [\d,]+0 a difference of 1 %$",
        sentence,
    )
    little = np.random.default_rng(3).normal(1.0, 0.005, 400)
    _, sentence = judged(run("a", values), run("b", little * values))
    assert sentence.endswith("; a difference of 1 % would have been found")


@pytest.mark.parametrize(("log", "error", "times"), [(1.5, 0.7, 2.1), (-0.75, 0.35, 2.1), (0.1, 0.1, 9.6)])
def test_what_a_relative_difference_needs_is_that_of_its_logarithm(log, error, times):
    low, value, high = np.expm1([log - 2.262 * error, log, log + 2.262 * error])
    relative = Estimate(value=value, low=low, high=high, standard_error=error)
    change = Change(metric=TTFT, a=1.0, b=1 + value, difference=Difference(absolute=None, relative=relative))
    found = Comparison(run=run("b", np.ones(400)), changes=[change], is_identical=False)
    sentence = verdict(found, TTFT, BlockBootstrap(np.arange(400)), 400)
    needed = re.search(r"; about ([\d,]+) more requests would show one as large as this, ", sentence)
    assert needed is not None
    assert int(needed[1].replace(",", "")) == pytest.approx(400 * (times - 1), rel=0.05)


def test_shares_differ_by_points(values):
    found, sentence = judged(run("a", values, 40.0), run("b", values, 42.5), SAVED)
    assert sentence == (
        "b has 2.50 points more prompt tokens saved: 42.5 % instead of 40.0 % (95 %: 2.50 to 2.50 points)"
    )
    change = found.changes[-1]
    assert (change_text(change), interval_text(change)) == ("+2.50 points", "+2.50 to +2.50 points")
    _, sentence = judged(run("a", values, 42.5), run("b", values, 40.0), SAVED)
    assert "2.50 points fewer prompt tokens saved" in sentence


@pytest.mark.parametrize(
    ("low", "shown"),
    [(0.0002, "+0.02 to +5.80 points"), (-0.0002, "0.0 to +5.8 points"), (0.03, "+3.0 to +5.8 points")],
)
def test_an_interval_that_excludes_0_does_not_seem_to_end_there(low, shown):
    points = Estimate(value=0.03, low=low, high=0.058, standard_error=0.01)
    change = Change(metric=SAVED, a=0.4, b=0.43, difference=Difference(absolute=points, relative=None))
    assert interval_text(change) == shown


def test_requests_that_failed_in_one_run_are_left_out_of_both(values):
    failed = 2 * values
    failed[:100] = np.nan
    found, _ = judged(run("a", values), run("b", failed))
    change = found.changes[0]
    assert change.a == pytest.approx(values[100:].mean())
    assert change.shown.value == pytest.approx(1.0)
    nothing, sentence = judged(run("a", values), run("b", np.full(400, np.nan)))
    assert sentence == "b: mean TTFT cannot be compared: it is zero or unknown in a or b"
    assert change_rows(nothing)[0][1:] == ("-", "-", "-", "-")


def test_few_sessions_have_a_difference_without_an_interval():
    values = np.ones(5)
    found, sentence = judged(run("a", values), run("b", 1.1 * values))
    assert sentence == "b: +10.0 % mean TTFT; 5 sessions are too few for an interval"
    assert change_rows(found)[0] == ("mean TTFT", "1.000 s", "1.100 s", "+10.0 %", "-")


def test_figures_have_the_unit_of_their_metric():
    named = {each.name: each for each in SERVING_METRICS}
    assert figure_text(named["tpot"], 0.0123) == "12.3 ms"
    assert figure_text(named["good"], 0.5) == "50.0 %"
    assert figure_text(named["ttft"], None) == "-"


def test_several_variants_share_their_level():
    bootstrap = BlockBootstrap(np.arange(100))
    assert "(95 %, of all 3 together)" in about(bootstrap, 3, TTFT)
    assert about(bootstrap, 3, TTFT).endswith(" Fewer variants have narrower ones.")
    assert about(bootstrap, 1, TTFT).endswith(" blocks of 10 sessions that follow each other.")
