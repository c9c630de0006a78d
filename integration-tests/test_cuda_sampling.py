"""Tokens drawn on a device are those that the sampler draws."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from sagellm.engines.sampling import filters
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.random import uniforms
from sagellm.engines.sampling.rows import SamplingRow
from sagellm.engines.sampling.sampler import Sampler

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed; `hatch run cuda` installs it")

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
NUM_ROWS = 4


def drawn(logits, params, seed):
    from sagellm.accel.cuda.sampling import draw_tokens

    numbers = uniforms([seed] * len(logits), list(range(len(logits))))
    settings = [
        [each.temperature, each.min_p, each.top_k, filters.dropped_share(each.top_p), number]
        for each, number in zip(params, numbers, strict=True)
    ]
    return draw_tokens(logits.to(DEVICE), torch.tensor(settings, dtype=torch.float64, device=DEVICE)).tolist()


def sampled(logits, params, seed):
    rows = [
        SamplingRow(params=each, seed=seed, position=row, prompt_token_ids=(), output_token_ids=())
        for row, each in enumerate(params)
    ]
    return [each.token_id for each in Sampler().sample(logits, rows)]


KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.2},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1e-6},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.5},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("vocab_size", "sharpness"), [(515, 2.0), (9000, 4.0), (9000, 0.01)])
def test_a_draw_is_the_samplers(kind, vocab_size, sharpness):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * sharpness
    params = [SamplingParams(**kind)] * NUM_ROWS
    assert drawn(logits, params, -7) == sampled(logits, params, -7)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equal_logits_are_dropped_in_the_same_order(kind):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(-3, 4, (NUM_ROWS, 700), generator=generator).float()
    params = [SamplingParams(**kind)] * NUM_ROWS
    assert drawn(logits, params, 3) == sampled(logits, params, 3)


def test_rows_of_a_batch_may_differ():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(KINDS), 3000, generator=generator) * 3
    params = [SamplingParams(**kind) for kind in KINDS]
    together = drawn(logits, params, 9)
    assert together == sampled(logits, params, 9)
    numbers = np.arange(len(KINDS))
    assert [drawn(logits[: row + 1], params[: row + 1], 9)[row] for row in numbers] == together


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_distribution_is_minus_one(value):
    logits = torch.randn(len(KINDS), 600)
    logits[:, 300] = value
    assert drawn(logits, [SamplingParams(**kind) for kind in KINDS], 0) == [-1] * len(KINDS)
    assert drawn(torch.full((1, 600), -torch.inf), [SamplingParams()], 0) == [-1]


def test_masked_tokens_are_never_drawn():
    logits = torch.full((NUM_ROWS, 600), -torch.inf)
    logits[:, [5, 130, 599]] = torch.tensor([1.0, 2.0, 0.5])
    for kind in KINDS:
        params = [SamplingParams(**kind)] * NUM_ROWS
        assert drawn(logits, params, 2) == sampled(logits, params, 2)
