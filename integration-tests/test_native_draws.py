"""Tokens that the native library draws are those that the sampler draws with torch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sagellm.accel.native import NativeDraw
from sagellm.core import UnsupportedModelError
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.sampling import draws
from sagellm.engines.sampling.random import numbers_of, uniforms
from sagellm.engines.sampling.rows import BadLogitsError, SamplingRow
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.testing import make_checkpoint


@pytest.fixture(scope="module")
def draw():
    try:
        return NativeDraw()
    except UnsupportedModelError as error:
        pytest.skip(str(error))


def random_params(rng):
    return SamplingParams(
        temperature=rng.choice([0.0, 0.2, 0.7, 1.0, 1.0, 1.6]),
        top_k=rng.choice([0, 0, 1, 5, 50, 120, 400, 700, 10**6]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.05, 0.5, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.02, 0.3, 1.0]),
        logprobs=rng.choice([None, None, None, 2]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3]),
    )


def rows_of(rng, count, seed):
    return [
        SamplingRow(random_params(rng), seed, position, (1, 2, 3), (5, position % 7))
        for position in range(count)
    ]


def ids_of(tokens):
    return [each.token_id for each in tokens]


@pytest.mark.parametrize("vocab_size", [6, 300, 1000, 20_001])
def test_a_kernels_token_is_the_samplers(draw, vocab_size):
    rng = random.Random(vocab_size)
    ours, theirs = Sampler(draw=draw), Sampler()
    for turn in range(12):
        generator = torch.Generator().manual_seed(turn)
        logits = torch.randn(48, vocab_size, generator=generator) * rng.choice([0.3, 1.0, 4.0])
        if turn % 3 == 1:
            logits = logits.to(torch.bfloat16).float()  # many ties
        if turn % 3 == 2 and vocab_size > 100:
            logits[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
        rows = rows_of(rng, 48, turn)
        assert ours.sample(logits, rows) == theirs.sample(logits, rows)


def test_a_kernels_own_numbers_are_those_of_the_generator(draw):
    generator = np.random.default_rng(5)
    keys, positions = generator.integers(0, 2**64, (2, 400), np.uint64)
    positions[:200] %= 1000
    settings = np.tile([1.0, 0.0, 0.0, -1.0, 0.0], (400, 1))
    logits = torch.zeros(400, 1 << 14)
    drawn = draw.choose(logits, settings, keys, positions)
    settings[:, 4] = numbers_of(keys, positions)
    assert drawn.tolist() == draw.choose(logits, settings).tolist()
    assert drawn.tolist() == (settings[:, 4] * (1 << 14)).astype(np.int64).tolist()


@pytest.mark.full
@pytest.mark.parametrize("spread", [0.5, 1.0, 3.0])
def test_over_a_large_vocabulary_tokens_differ_at_most_at_a_border(draw, spread):
    """float32 weights leave both cumulative sums with errors of some 1e-8 of the whole."""
    ours, theirs = Sampler(draw=draw), Sampler()
    params = SamplingParams(temperature=0.9)
    num_different = 0
    for turn in range(10):
        logits = torch.randn(32, 151_936, generator=torch.Generator().manual_seed(turn)) * spread
        rows = [SamplingRow(params, turn, row, (), ()) for row in range(32)]
        pairs = zip(ids_of(ours.sample(logits, rows)), ids_of(theirs.sample(logits, rows)), strict=True)
        numbers = uniforms([turn] * 32, list(range(32)))
        for row, (mine, other) in enumerate(pairs):
            if mine == other:
                continue
            num_different += 1
            up_to = (logits[row].double() / 0.9).softmax(0).cumsum(0)
            assert abs(float(up_to[min(mine, other)]) - numbers[row]) < 1e-7
    assert num_different <= 3


def test_rows_that_are_not_distributions_are_named(draw):
    logits = torch.randn(6, 500)
    logits[[1, 4], 7] = torch.nan
    rows = rows_of(random.Random(1), 6, 0)
    with pytest.raises(BadLogitsError) as caught:
        Sampler(draw=draw).sample(logits, rows)
    assert caught.value.rows == (1, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("drawn"), num_hidden_layers=1)


def test_an_engines_tokens_are_the_same_with_and_without_the_library(draw, checkpoint, monkeypatch):
    prompts = [[5, 6, 7, 8] * 5, [9, 10], [30] * 40, [77], [78, 79], [11] * 9]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 5, "logprobs": 2},
        {"min_p": 0.05, "presence_penalty": 0.5},
        {"temperature": 1.2},
        {"top_k": 50, "top_p": 0.95},
    ]
    params = [
        SamplingParams(seed=seed, max_tokens=8 + seed, ignore_eos=True, **kind)
        for seed, kind in enumerate(kinds)
    ]
    monkeypatch.setattr(draws, "device_draw", lambda device: draw)
    found = tokens_of(checkpoint, prompts, params)
    monkeypatch.setattr(draws, "device_draw", lambda device: None)
    assert found == tokens_of(checkpoint, prompts, params)


def tokens_of(checkpoint, prompts, params):
    engine = LLMEngine(
        EngineConfig(
            model={"name": str(checkpoint), "device": "cpu"},
            kv={"num_blocks": 60, "block_size": 8},
            scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 32},
        )
    )
    try:
        return [each.outputs[0].token_ids for each in engine.generate(prompts, params)]
    finally:
        engine.close()


def test_an_engine_on_a_cpu_draws_with_the_library_if_it_runs_here(draw):
    del draw
    assert isinstance(draws.device_draw(torch.device("cpu")), NativeDraw)
    assert draws.device_draw(torch.device("meta")) is None


def test_without_the_library_the_sampler_draws_alone(monkeypatch):
    def refuse(variant=None):
        raise UnsupportedModelError("it was not built")

    monkeypatch.setattr("sagellm.accel.native.sampling.best_or_named", refuse)
    assert draws.device_draw(torch.device("cpu")) is None
