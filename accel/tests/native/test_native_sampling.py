"""Tokens that the library draws, against plain loops over sorted rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sagellm.accel.native import NativeDraw

NO_TOP_P = -1.0
EDIT = np.dtype([("token", np.int32), ("factor", np.float32), ("addend", np.float32)])
BLOCK = 128
GREEDY = (0.0, 0.0, 0.0, NO_TOP_P)
KINDS = [
    GREEDY,
    *((temperature, 0.0, 0.0, NO_TOP_P) for temperature in (1.0, 0.7)),
    (1.0, 0.0, 1.0, NO_TOP_P),
    (1.3, 0.0, 20.0, NO_TOP_P),
    (1.0, 0.0, 400.0, NO_TOP_P),
    (1.0, 0.0, 1e9, 0.3),
    *((temperature, 0.0, 0.0, dropped) for temperature, dropped in ((1.0, 0.1), (0.8, 0.8), (1.5, 1e-3))),
    (0.8, 0.0, 0.0, 1.0),
    (1.0, 0.1, 0.0, NO_TOP_P),
    (1.0, 1e-6, 0.0, 0.05),
    (1.0, 1.0, 0.0, 0.05),
    (0.9, 0.02, 50.0, 0.1),
    (1.5, 0.0, 3.0, 0.5),
]


@dataclass
class Details:
    """What rows ask for beside a token; by default nothing."""

    places: object = None
    replaced: object = None
    replaced_rows: object = None
    masks: object = None
    mask_rows: object = None
    edits: object = None
    edit_offsets: object = None
    num_top: object = None
    logprobs: object = None


@pytest.fixture(scope="module")
def draw(library):
    return NativeDraw(library.variant)


def settings_of(kinds, numbers):
    return torch.tensor(
        [(*kind, number) for kind, number in zip(kinds, numbers, strict=True)], dtype=torch.float64
    )


def expected(logits, settings):
    """One row's token, by sorting it."""
    temperature, min_p, top_k, dropped, number = settings
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return -1
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / np.float32(temperature)
    weights = np.exp(scaled - scaled.max()).astype(np.float64)
    weights[weights < np.float32(min_p)] = 0
    if 0 < top_k < len(logits):
        weights[scaled < np.sort(scaled)[-int(top_k)]] = 0
    if dropped >= 0:
        order = np.lexsort((-np.arange(len(logits)), -scaled))
        before = weights[order].cumsum() - weights[order]
        total = weights.sum()
        weights[order[(total - before <= dropped * total) & (before > 0)]] = 0
    up_to = weights.cumsum()
    return int(np.searchsorted(up_to, number * up_to[-1], side="right"))


def check(draw, logits, settings):
    tokens = draw(logits, settings).tolist()
    assert tokens == [
        expected(row, each) for row, each in zip(logits.numpy(), settings.tolist(), strict=True)
    ]


def rows_of(vocab_size, sharpness, seed=0):
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.standard_normal((len(KINDS), vocab_size), np.float32) * sharpness)
    return logits.float(), settings_of(KINDS, generator.random(len(KINDS)))


@pytest.mark.parametrize("vocab_size", [1, 15, 128, 515, 9001])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 6.0])
def test_a_token_is_the_inverse_of_the_cumulative_weight(draw, vocab_size, sharpness):
    for seed in range(6):
        check(draw, *rows_of(vocab_size, sharpness, seed))


@pytest.mark.parametrize("vocab_size", [700, 6000])
def test_of_equal_logits_top_p_drops_the_lowest_ids(draw, vocab_size):
    for seed in range(6):
        logits, settings = rows_of(vocab_size, 1.5, seed)
        check(draw, logits.round(), settings)
    check(draw, torch.zeros_like(logits), settings)


def test_a_border_that_the_forecast_misses_is_found(draw):
    """It looks at one token of each block besides the largest: here they are unlike the others."""
    vocab_size = 40 * BLOCK
    rng = np.random.default_rng(3)
    seen = np.arange(40) * BLOCK + np.arange(40) * 53 % BLOCK
    kinds = [(1.0, 0.0, 0.0, dropped) for dropped in (0.02, 0.3, 0.9)]
    for level in (-15.0, 5.0):
        logits = rng.standard_normal((len(kinds), vocab_size)).astype(np.float32)
        logits[:, seen] = level
        check(draw, torch.from_numpy(logits), settings_of(kinds, rng.random(len(kinds))))


def test_a_row_has_one_token_alone_in_a_batch_and_cut_among_threads(draw, monkeypatch):
    logits, settings = rows_of(9001, 1.0)
    tokens = []
    for num_threads in (1, 2, 3, 20):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        tokens.append(draw(logits, settings).tolist())
        tokens.append([int(draw(logits[[row]], settings[[row]])) for row in range(len(KINDS))])
        pairs = [draw(logits[row : row + 2], settings[row : row + 2]) for row in range(0, len(KINDS), 2)]
        tokens.append(torch.cat(pairs).tolist())
    assert all(each == tokens[0] for each in tokens)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_a_distribution_is_minus_one_and_others_are_drawn(draw, value):
    logits, settings = rows_of(600, 1.0)
    logits[::2, 599] = value
    logits[4] = -torch.inf
    check(draw, logits, settings)
    assert (draw(logits, settings) >= 0).tolist() == [row % 2 == 1 for row in range(len(KINDS))]


def test_masked_tokens_are_never_drawn(draw):
    logits = torch.full((len(KINDS), 1000), -torch.inf)
    logits[:, [5, 130, 999]] = torch.tensor([1.0, 2.0, 0.5])
    for number in (0.0, 0.3, 0.7, 1 - 2.0**-53):
        check(draw, logits, settings_of(KINDS, [number] * len(KINDS)))


def test_extreme_temperatures_and_logits_are_drawn_too(draw):
    logits = torch.tensor([[-torch.inf, 3e4, -3e4, 2e4, *[-1e30] * 200]])
    kinds = itertools.product((1.1e-5, 1e6), (0.0, 0.5), (0.0, 3.0), (NO_TOP_P, 0.3))
    for kind, number in itertools.product(kinds, (0.1, 0.6, 0.9)):
        check(draw, logits, settings_of([kind], [number]))
    check(draw, torch.full((1, 300), -3e38), settings_of([(1.0, 0.0, 0.0, 0.1)], [0.5]))
    assert draw(torch.full((1, 300), 3e38), settings_of([(1e-5, 0.0, 0.0, 0.1)], [0.5])).tolist() == [-1]


def test_no_rows_have_no_tokens(draw):
    assert draw(torch.empty(0, 100), torch.empty(0, 5, dtype=torch.float64)).shape == (0,)


def test_draws_follow_the_weights(draw):
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 1.5
    rng = np.random.default_rng(7)
    num_draws = 20_000
    settings = settings_of([(0.9, 0.0, 0.0, NO_TOP_P)] * num_draws, rng.random(num_draws))
    counts = np.bincount(draw(logits.expand(num_draws, -1), settings).numpy(), minlength=200)
    wanted = (logits.double() / 0.9).softmax(0).numpy() * num_draws
    # The statistic's mean is 199, and its standard deviation 20.
    assert ((counts - wanted) ** 2 / wanted).sum() < 300


def changes_of(rng, num_rows, vocab_size):
    """Masks for every second row, and edits for two of three."""
    num_words = -(-vocab_size // 32)
    masks = rng.integers(0, 2**32, ((num_rows + 1) // 2, num_words), np.uint32)
    masks[:, 0] |= 1
    mask_rows = np.full(num_rows, -1, np.int32)
    mask_rows[::2] = rng.permutation(len(masks))
    edits = np.zeros(3 * num_rows, EDIT)
    edits["token"] = rng.integers(0, vocab_size, len(edits))
    edits["factor"] = rng.choice([1.0, 1.3, 0.6], len(edits))
    edits["addend"] = rng.choice([0.0, 2.5, -1.25, -np.inf], len(edits))
    edits["addend"][edits["token"] == 0] = 0.0  # something is always left
    counts = rng.choice([0, 3, 1], num_rows)
    offsets = np.concatenate(([0], counts.cumsum()))
    return Details(masks=masks, mask_rows=mask_rows, edits=edits, edit_offsets=offsets)


def changed(logits, details):
    rows = logits.numpy().copy()
    for index, row in enumerate(rows):
        if details.mask_rows[index] >= 0:
            words = details.masks[details.mask_rows[index]]
            row[[not words[token // 32] >> (token % 32) & 1 for token in range(len(row))]] = -np.inf
        for token, factor, addend in details.edits[slice(*details.edit_offsets[index : index + 2])]:
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
            row[token] += addend
    return torch.from_numpy(rows)


@pytest.mark.parametrize("vocab_size", [5, 32, 200, 5003])
def test_masks_and_edits_are_those_of_plain_loops(draw, vocab_size, monkeypatch):
    for seed in range(4):
        logits, settings = rows_of(vocab_size, 2.0, seed)
        details = changes_of(np.random.default_rng(seed), len(KINDS), vocab_size)
        before = logits.clone()
        for num_threads in (1, 3, 40):
            monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
            tokens = draw.choose(logits, settings.numpy(), details=details)
            assert tokens.tolist() == draw(changed(logits, details), settings).tolist()
        assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [3, 200, 5003])
@pytest.mark.parametrize("sharpness", [0.01, 4.0])
def test_log_probabilities_are_those_of_the_logits_as_they_came(draw, vocab_size, sharpness):
    logits, settings = rows_of(vocab_size, sharpness)
    logits[1::2, 1] = -torch.inf
    logits[2] = logits[2].round()
    details = changes_of(np.random.default_rng(1), len(KINDS), vocab_size)
    most = min(4, vocab_size)
    details.num_top = np.array([-1, 0, most, 2] * len(KINDS), np.int32)[: len(KINDS)]
    details.logprobs = np.full((len(KINDS), 2 + 2 * most), 7.0)
    tokens = draw.choose(logits, settings.numpy(), details=details)
    assert tokens.tolist() == draw(changed(logits, details), settings).tolist()
    for row, token, num_top, found in zip(logits, tokens, details.num_top, details.logprobs, strict=True):
        if num_top < 0:
            assert (found == 7.0).all()
            continue
        logprobs = row.double().log_softmax(0)
        order = np.lexsort((np.arange(vocab_size), -row.numpy()))[:num_top]
        assert found[0] == pytest.approx(float(logprobs[token]), abs=1e-6)
        assert found[1] == int((row >= row[token]).sum())
        assert found[2 : 2 + num_top].tolist() == pytest.approx(logprobs[order].tolist(), abs=1e-6)
        assert found[2 + most :][:num_top].tolist() == order.tolist()


def test_log_probabilities_of_a_row_that_is_not_a_distribution_are_nan(draw):
    logits = torch.zeros(3, 300)
    logits[0, 200], logits[1, 200] = torch.nan, torch.inf
    mask = np.full((1, 10), 2**32 - 1, np.uint32)
    mask[0, 6] = 0  # tokens 192 to 223
    details = Details(masks=mask, mask_rows=np.zeros(3, np.int32))
    details.num_top, details.logprobs = np.full(3, 2, np.int32), np.zeros((3, 6))
    tokens = draw.choose(logits, np.array([[*GREEDY, 0.0]] * 3), details=details)
    assert tokens.tolist() == [0, 0, 0]
    assert np.isnan(details.logprobs[:, 0]).tolist() == [True, True, False]
