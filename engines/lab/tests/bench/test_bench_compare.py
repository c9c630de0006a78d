"""Comparisons name what got worse by more than noise."""

from __future__ import annotations

import pytest

from sagellm.lab.bench.compare import compare_results, more_is_better


def spread(median, wide=0.0, count=100):
    return {
        "mean": median, "min": median, "median": median, "p90": median + wide,
        "p95": median + wide, "p99": median + 2 * wide, "max": median + 2 * wide, "count": count,
    }  # fmt: skip


def result(**figures):
    return {"benchmark": "serve", "figures": figures}


def regressions(*results):
    return [change.name for change in compare_results(results).regressions]


def test_a_slower_median_is_a_regression_and_a_faster_one_is_none():
    before, after = result(ttft_ms=spread(100.0)), result(ttft_ms=spread(120.0))
    assert regressions(before, after) == ["ttft_ms.mean", "ttft_ms.median"]
    assert regressions(after, before) == []
    assert [one.is_worse for one in compare_results([after, before]).changes] == [False, False]


def test_what_a_spread_explains_is_noise():
    # sigma 128.2 ÷ 1.2816 = 100, of 4 values: the standard error of the mean is 50, of 100 values 10
    before, after = (result(ttft_ms=spread(median, 128.16, count=4)) for median in (100.0, 120.0))
    assert regressions(before, after) == []
    before, after = (result(ttft_ms=spread(median, 128.16, count=100)) for median in (100.0, 150.0))
    assert regressions(before, after) == ["ttft_ms.mean", "ttft_ms.median"]


def test_an_unsteady_run_makes_a_throughput_uncertain():
    slower = {"output_throughput_tokens_per_s": 80.0}
    faster = {"output_throughput_tokens_per_s": 100.0}
    assert regressions(result(**faster), result(**slower)) == ["output_throughput_tokens_per_s"]
    unsteady = {"output_tenths_tokens_per_s": spread(90.0, 90.0, count=10)}
    assert regressions(result(**faster, **unsteady), result(**slower, **unsteady)) == []


def test_a_change_of_a_few_percent_is_never_one():
    assert regressions(result(token_hit_rate=0.5), result(token_hit_rate=0.48)) == []
    assert regressions(result(token_hit_rate=0.5), result(token_hit_rate=0.4)) == ["token_hit_rate"]


def test_a_figure_that_is_new_or_zero_is_judged_only_where_it_can_be():
    assert regressions(result(num_failed=0), result(num_failed=3)) == ["num_failed"]
    assert regressions(result(mfu=0.5), result(goodput_requests_per_s=1.0)) == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ttft_ms.median", False),
        ("ttft_ms.p99", None),
        ("goodput_requests_per_s", True),
        ("roofline_ratio", True),
        ("peak_gflops_per_s", None),
        ("num_requests", None),
        ("saturated.high_priority_ttft_p99_ms.sagellm", False),
        ("steady.ideal_hit_rate.vllm", None),
    ],
)
def test_which_way_a_figure_is_better(name, more):
    assert more_is_better(name) is more
