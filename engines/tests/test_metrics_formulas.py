"""Metrics of caching, fairness, latency and prediction against values worked out by hand."""

import statistics

import pytest
from hypothesis import given, strategies as st

from sagellm.core import InvalidInputError
from sagellm.engines.metrics.cache import (
    PromptBlocks,
    block_sharing_fraction,
    external_fragmentation,
    gap_closed,
    internal_fragmentation,
    mean_block_sharing_fraction,
    memory_use_gain,
    re_prefill_rate,
    sharing_fraction_source,
    token_hit_rate,
    token_saving,
    utilisation,
)
from sagellm.engines.metrics.fairness import BatchStep, batching_efficiency, jains_index
from sagellm.engines.metrics.latency import (
    RequestTimes,
    goodput,
    itl_s,
    percentile,
    throughput,
    total_throughput,
    tpot_s,
    ttft_s,
)

S = 10**9


def test_token_rates():
    assert token_hit_rate(48, 64) == 0.75
    assert token_saving(16, 64) == 0.25
    assert re_prefill_rate(150, 1000) == 0.15
    assert token_hit_rate(0, 0) == 0


def test_more_hits_than_tokens_are_refused():
    with pytest.raises(InvalidInputError, match="token hit rate"):
        token_hit_rate(65, 64)
    with pytest.raises(InvalidInputError):
        token_saving(-1, 64)


def test_sharing_overall_weighs_blocks_and_per_request_weighs_requests():
    prompts = [PromptBlocks(num_reused=9, num_new=1), PromptBlocks(num_reused=0, num_new=2)]
    assert block_sharing_fraction(prompts) == 9 / 12
    assert mean_block_sharing_fraction(prompts) == (0.9 + 0.0) / 2
    assert block_sharing_fraction([]) == mean_block_sharing_fraction([]) == 0


def test_the_source_counts_partial_last_blocks_as_reused():
    # its multi-turn experiment: 5,080 blocks allocated, of which 1,780 were newly cached
    assert sharing_fraction_source(5080, 1780) == pytest.approx(0.6496, abs=1e-4)
    # its single-turn experiment: 2,182 and 2,090
    assert sharing_fraction_source(2182, 2090) == pytest.approx(0.0422, abs=1e-4)


def test_fragmentation_and_utilisation():
    assert internal_fragmentation(60, 4, 16) == 1 - 60 / 64
    assert internal_fragmentation(0, 0, 16) == 0
    assert external_fragmentation(6, 8) == 0.25
    assert external_fragmentation(0, 0) == 0
    assert utilisation([90, 100], 100) == 0.95
    assert utilisation([], 100) == 0
    assert memory_use_gain(32, 8) == 4


def test_the_gap_to_belady():
    assert gap_closed(20.0, 10.0, 35.0) == 0.4
    assert gap_closed(5.0, 10.0, 35.0) == -0.2
    with pytest.raises(InvalidInputError, match="no gap"):
        gap_closed(0.2, 0.2, 0.2)


def test_nothing_reserved_gains_nothing():
    with pytest.raises(InvalidInputError):
        memory_use_gain(8, 0)


def test_jains_index_by_hand():
    assert jains_index([1, 1, 1, 1]) == 1
    assert jains_index([1, 0, 0, 0]) == 0.25
    assert jains_index([1, 2, 3]) == pytest.approx(36 / (3 * 14))
    assert jains_index([]) == jains_index([0, 0]) == 1
    assert jains_index([1e-200, 1e-200]) == 1
    with pytest.raises(InvalidInputError):
        jains_index([1, -1])


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=20))
def test_jains_index_lies_between_one_nth_and_one(shares):
    assert 1 / len(shares) - 1e-9 <= jains_index(shares) <= 1 + 1e-9


def test_batching_efficiency_takes_the_tighter_limit():
    steps = [
        BatchStep(num_useful_tokens=100, token_budget=200, num_admissible_tokens=100),
        BatchStep(num_useful_tokens=100, token_budget=200, num_admissible_tokens=1000),
        BatchStep(num_useful_tokens=5, token_budget=200, num_admissible_tokens=0),
    ]
    assert batching_efficiency(steps) == (1.0 + 0.5) / 2
    assert batching_efficiency([]) == 0


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=300))
def test_percentiles_equal_the_standard_librarys_inclusive_method(values):
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, 50) == pytest.approx(statistics.median(values))
    assert percentile(values, 99) == pytest.approx(cuts[98])
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


def test_percentiles_by_hand():
    assert percentile([40, 10, 20, 30], 50) == 25  # rank 1.5, halfway between 20 and 30
    assert percentile([7], 99) == 7


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1], -1), ([1], 101), ([1], float("nan"))])
def test_a_percentile_needs_values_and_a_share(values, percent):
    with pytest.raises(InvalidInputError):
        percentile(values, percent)


def test_request_latencies():
    month_ns = 30 * 86_400 * S
    assert ttft_s(month_ns, month_ns + 250_000_000) == 0.25
    assert tpot_s(S, 3 * S, 5) == 0.5
    assert tpot_s(S, S, 1) is None
    assert itl_s([0, S, 3 * S]) == [1.0, 2.0]
    assert itl_s([5]) == []
    with pytest.raises(InvalidInputError, match="before its start"):
        ttft_s(2, 1)


def test_rates_of_a_run():
    assert throughput(1000, 0, 4 * S) == 250
    assert total_throughput(3000, 1000, S, 5 * S) == 1000
    with pytest.raises(InvalidInputError, match="no time"):
        throughput(1, S, S)


def test_goodput_counts_requests_that_met_both_limits():
    met = RequestTimes(arrival_ns=0, first_token_ns=S, last_token_ns=3 * S, num_output_tokens=5)
    late = RequestTimes(arrival_ns=0, first_token_ns=2 * S, last_token_ns=3 * S, num_output_tokens=5)
    slow = RequestTimes(arrival_ns=0, first_token_ns=S, last_token_ns=9 * S, num_output_tokens=5)
    single = RequestTimes(arrival_ns=0, first_token_ns=S, last_token_ns=S, num_output_tokens=1)
    limits = {"max_ttft_s": 1.0, "max_tpot_s": 0.5, "start_ns": 0, "end_ns": 10 * S}
    assert goodput([met, late, slow, single], **limits) == 0.2
    assert goodput([], **limits) == 0
