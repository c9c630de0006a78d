import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sagellm.engines.sampling.filters import (
    apply_min_p_filtering,
    apply_temperature,
    apply_top_k_filtering,
    apply_top_p_filtering,
)
from sagellm.engines.sampling.mass_cut import mass_cut
from sagellm.engines.sampling.selection import first_argmax, kth_largest, largest

VOCABULARIES = (1, 2, 7, 128, 129, 300, 1000, 4096, 32001)
NO_IDS = torch.zeros(1, 1, dtype=torch.long)


def random_logits(vocab_size, rows=4, seed=0, spread=3.0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def with_masked(logits):
    """The same logits with about a third at -inf, the first of each row excepted."""
    mask = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[:, 0] = False
    return logits.masked_fill(mask, -torch.inf)


def stable_top_p(logits, top_p):
    """transformers' warper with a stable sort, so that ties have one answer."""
    ordered, ids = torch.sort(logits, stable=True)
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[:, -1] = False
    return logits.masked_fill(removed.scatter(1, ids, removed), -torch.inf)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("masked", [False, True])
def test_each_filter_equals_that_of_transformers(vocab_size, masked):
    logits = random_logits(vocab_size)
    if masked:
        logits = with_masked(logits)
    for temperature in (0.3, 0.7, 1.0, 1.9):
        expected = TemperatureLogitsWarper(temperature)(NO_IDS, logits)
        assert torch.equal(apply_temperature(logits, temperature), expected)
    for min_p in (0.01, 0.1, 0.9, 1.0):
        assert torch.equal(apply_min_p_filtering(logits, min_p), MinPLogitsWarper(min_p)(NO_IDS, logits))
    for top_k in (1, 2, 50, 1000, 10**6):
        assert torch.equal(apply_top_k_filtering(logits, top_k), TopKLogitsWarper(top_k)(NO_IDS, logits))
    for top_p in (1e-4, 0.1, 0.5, 0.9, 0.99):
        assert torch.equal(apply_top_p_filtering(logits, top_p), TopPLogitsWarper(top_p)(NO_IDS, logits))


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_filters_in_a_row_equal_those_of_transformers_on_a_large_vocabulary(spread):
    logits = with_masked(random_logits(151_936, rows=2, seed=3, spread=spread))
    ours = apply_temperature(logits, 0.8)
    theirs = TemperatureLogitsWarper(0.8)(NO_IDS, logits)
    steps = (
        (apply_min_p_filtering, MinPLogitsWarper, 1e-4),
        (apply_top_k_filtering, TopKLogitsWarper, 5000),
        (apply_top_p_filtering, TopPLogitsWarper, 0.95),
    )
    for apply, warper, setting in steps:
        ours, theirs = apply(ours, setting), warper(setting)(NO_IDS, theirs)
        assert torch.equal(ours, theirs)
    assert torch.equal(apply_top_p_filtering(logits, 0.9), TopPLogitsWarper(0.9)(NO_IDS, logits))


def test_ties_are_kept_or_dropped_as_by_a_stable_sort():
    generator = torch.Generator().manual_seed(5)
    for vocab_size, values in ((50, 3), (1000, 6), (5000, 40)):
        logits = torch.randint(-values, values, (6, vocab_size), generator=generator) / 2.0
        for top_p in (0.05, 0.3, 0.6, 0.9):
            ours = apply_top_p_filtering(logits, top_p)
            assert torch.equal(ours, stable_top_p(logits, top_p))
            theirs = TopPLogitsWarper(top_p)(NO_IDS, logits)
            assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
        for top_k in (1, 5, 40):
            assert torch.equal(apply_top_k_filtering(logits, top_k), TopKLogitsWarper(top_k)(NO_IDS, logits))
        assert torch.equal(apply_min_p_filtering(logits, 0.2), MinPLogitsWarper(0.2)(NO_IDS, logits))


def test_equal_probabilities_that_reach_p_exactly_drop_what_transformers_drops():
    logits = torch.zeros(1, 8)
    for top_p in (0.125, 0.25, 0.5, 0.75, 0.875):
        assert torch.equal(apply_top_p_filtering(logits, top_p), stable_top_p(logits, top_p))


def test_each_row_has_its_own_setting_and_rows_without_one_are_untouched():
    logits = random_logits(500, rows=4)
    top_k = apply_top_k_filtering(logits, torch.tensor([0, 3, -1, 600]))
    top_p = apply_top_p_filtering(logits, torch.tensor([1.0, 0.5, 0.9, 1.0]))
    min_p = apply_min_p_filtering(logits, torch.tensor([0.0, 0.5, 0.0, 0.1]))
    assert torch.equal(top_k[[0, 2, 3]], logits[[0, 2, 3]])
    assert torch.equal(top_k[1:2], TopKLogitsWarper(3)(NO_IDS, logits[1:2]))
    assert torch.equal(top_p[[0, 3]], logits[[0, 3]])
    assert torch.equal(top_p[1:2], TopPLogitsWarper(0.5)(NO_IDS, logits[1:2]))
    assert torch.equal(min_p[[0, 2]], logits[[0, 2]])
    assert torch.equal(min_p[3:], MinPLogitsWarper(0.1)(NO_IDS, logits[3:]))


def test_without_any_filter_the_logits_themselves_come_back():
    logits = random_logits(300)
    assert apply_temperature(logits, 1.0) is logits
    assert apply_min_p_filtering(logits, 0.0) is logits
    assert apply_top_k_filtering(logits, 0) is logits
    assert apply_top_p_filtering(logits, 1.0) is logits


def test_filters_do_not_write_into_what_they_are_given():
    logits = random_logits(300)
    before = logits.clone()
    apply_temperature(logits, 0.5)
    apply_min_p_filtering(logits, 0.5)
    apply_top_k_filtering(logits, 5)
    apply_top_p_filtering(logits, 0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [1, 5, 128, 129, 4096, 20_000, 20_001])
@pytest.mark.parametrize("count", [1, 8, 32, 5000])
def test_selection_finds_the_largest(vocab_size, count):
    logits = with_masked(random_logits(vocab_size))
    candidates = largest(logits, count)
    assert torch.equal(candidates.values, logits.topk(min(count, vocab_size)).values)
    assert torch.equal(logits.gather(1, candidates.ids), candidates.values)
    assert all(len(set(ids)) == len(ids) for ids in candidates.ids.tolist())
    kth = kth_largest(logits, min(count, vocab_size))
    assert torch.equal(kth, candidates.values[:, -1:])


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 200, 1000, 20_001])
def test_the_first_of_equal_maxima_is_found(vocab_size):
    logits = torch.randint(0, 3, (8, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    values, ids = first_argmax(logits)
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.equal(values, logits.amax(-1))
    last = torch.zeros(1, vocab_size)
    last[0, -1] = 1.0
    assert first_argmax(last)[1].item() == vocab_size - 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([-np.inf, -7.5, -1e-30, -0.0, 0.0, 1e-30, 0.5, 0.75, 3.0, 88.0]),
        min_size=1,
        max_size=60,
    ),
    st.floats(0.0, 1.0),
)
def test_the_radix_cut_agrees_with_a_sort(values, share):
    row = np.array(values, dtype=np.float32)
    if not np.isfinite(row).any():
        return
    weights = torch.from_numpy(row).softmax(0).numpy()
    cut = mass_cut(row, weights, share)
    order = np.argsort(row, kind="stable")
    ascending = weights[order].astype(np.float64).cumsum()
    dropped = min(int((ascending <= share * ascending[-1]).sum()), len(row) - 1)
    kept = row > cut.value
    kept[np.flatnonzero(row == cut.value)[cut.num_dropped :]] = True
    borders = np.abs(ascending - share * ascending[-1]).min()
    if borders > 1e-12:  # else the order of the sums decides
        assert set(np.flatnonzero(kept)) == set(order[dropped:])
    assert kept.any()
