"""Tokens that the native library draws are those that the sampler draws with torch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sagellm.accel.native import NativeDraw
from sagellm.core import UnsupportedModelError, pack
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.sampling import draws
from sagellm.engines.sampling.draws import Details, edits_of, filters_of
from sagellm.engines.sampling.logprobs import width, with_logprobs
from sagellm.engines.sampling.random import key_of, numbers_of, uniforms
from sagellm.engines.sampling.rows import SampledToken, SamplingRow
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.sampling.sequence_penalties import SequencePenalties
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


def random_mask(rng, vocab_size):
    bits = [rng.random() < 0.7 for _ in range(-(-vocab_size // 32) * 32)]
    bits[0] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def rows_of(rng, count, seed, vocab_size=0):
    """Rows, half of them with masks if a vocabulary is given."""
    rows = [
        SamplingRow(random_params(rng), seed, position, pack([1, 2, 3]), (5, position % 7))
        for position in range(count)
    ]
    for row in rows:
        if vocab_size and rng.random() < 0.5:
            row.mask = random_mask(rng, vocab_size)
    return rows


def details_of(rows, vocab_size):
    """What rows ask for beside a token."""
    details = Details(mask_rows=np.full(len(rows), -1, np.int32))
    with_mask = [index for index, row in enumerate(rows) if row.mask is not None]
    if with_mask:
        details.masks = np.stack([rows[index].mask for index in with_mask])
        details.mask_rows[with_mask] = np.arange(len(with_mask))
    edits = [edits_of([])] * len(rows)
    for index, row in enumerate(rows):
        if row.params.has_penalties:
            penalties = SequencePenalties(row.params, row.prompt_token_ids, vocab_size)
            edits[index] = penalties.after_each(np.array(row.output_token_ids, np.int32), [])[0]
    details.edits = np.concatenate(edits)
    details.edit_offsets = np.cumsum([0, *map(len, edits)])
    details.num_top = np.array([-1 if row.params.logprobs is None else row.params.logprobs for row in rows])
    details.num_top = details.num_top.astype(np.int32)
    details.logprobs = np.empty((len(rows), width(max(0, *details.num_top.tolist()))))
    return details


def sampled(draw, logits, rows):
    """What the sampler returns, by the kernel."""
    settings = np.array([[*filters_of(row.params), 0.0] for row in rows])
    keys = np.array([key_of(row.seed) for row in rows], np.uint64)
    positions = np.array([row.position for row in rows], np.uint64)
    details = details_of(rows, logits.shape[1])
    tokens = draw.choose(logits, settings, keys, positions, details).tolist()
    return [
        SampledToken(token)
        if num_top < 0
        else with_logprobs(token, details.logprobs[index], min(num_top, logits.shape[1]))
        for index, (token, num_top) in enumerate(zip(tokens, details.num_top.tolist(), strict=True))
    ]


def ids_of(tokens):
    return [each.token_id for each in tokens]


def check_equal(ours, theirs, *, has_ties):
    """Tokens and ranks are equal, log-probabilities within 1e-5; of equal ones, either may be reported."""
    assert ids_of(ours) == ids_of(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.rank == other.rank
        if mine.logprob is None:
            assert other.logprob is None
            continue
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
        (my_ids, mine_top), (their_ids, their_top) = (
            zip(*each.top_logprobs, strict=True) if each.top_logprobs else ((), ()) for each in (mine, other)
        )
        assert list(mine_top) == pytest.approx(list(their_top), abs=1e-5)
        assert has_ties or my_ids == their_ids


@pytest.mark.parametrize("vocab_size", [6, 33, 300, 1000, 20_001])
def test_a_kernels_token_is_the_samplers(draw, vocab_size):
    rng = random.Random(vocab_size)
    for turn in range(12):
        generator = torch.Generator().manual_seed(turn)
        logits = torch.randn(48, vocab_size, generator=generator) * rng.choice([0.3, 1.0, 4.0])
        if turn % 3 == 1:
            logits = logits.to(torch.bfloat16).float()  # many ties
        if turn % 3 == 2 and vocab_size > 100:
            logits[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
        rows = rows_of(rng, 48, turn, vocab_size)
        before = logits.clone()
        ours = sampled(draw, logits, rows)
        assert torch.equal(logits, before)
        check_equal(ours, Sampler().sample(logits, rows), has_ties=turn % 3 > 0)


def test_details_count_by_row_alone_in_a_batch_and_cut_among_threads(draw, monkeypatch):
    rng = random.Random(2)
    logits = torch.randn(12, 9001, generator=torch.Generator().manual_seed(2))
    rows = rows_of(rng, 12, 2, 9001)
    together = sampled(draw, logits, rows)
    for num_threads in (1, 3, 20):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        assert sampled(draw, logits, rows) == together
        for index, row in enumerate(rows):
            (alone,) = sampled(draw, logits[[index]], [row])
            count = row.params.logprobs
            assert alone.token_id == together[index].token_id
            assert alone.top_logprobs == (None if count is None else together[index].top_logprobs)


def test_rows_may_draw_from_any_row_and_from_other_logits(draw):
    logits, others = torch.randn(4, 700), torch.randn(2, 700)
    details = Details(
        places=np.array([3, 0, 0], np.int32),
        replaced=others.numpy(),
        replaced_rows=np.array([-1, 1, -1], np.int32),
    )
    settings = np.tile([0.0, 0.0, 0.0, -1.0, 0.0], (3, 1))
    tokens = draw.choose(logits, settings, details=details)
    assert tokens.tolist() == [int(each.argmax()) for each in (logits[3], others[1], logits[0])]


def test_edits_are_made_in_order_and_tokens_beyond_the_vocabulary_are_skipped(draw):
    logits = torch.tensor([[2.0, -1.0, 0.5, torch.nan]])
    edits = np.concatenate((edits_of([0, 0], [-3.0, 1.5]), edits_of([3, 900])))
    edits["factor"][:1] = 2.0
    details = Details(edits=edits, edit_offsets=np.array([0, 4]))
    settings = np.array([[0.0, 0.0, 0.0, -1.0, 0.0]])
    assert draw.choose(logits, settings, details=details).tolist() == [2]  # 2 / 2 - 3 + 1.5 < 0.5


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
    params = SamplingParams(temperature=0.9)
    num_different = 0
    for turn in range(10):
        logits = torch.randn(32, 151_936, generator=torch.Generator().manual_seed(turn)) * spread
        rows = [SamplingRow(params, turn, row, (), ()) for row in range(32)]
        tokens = ids_of(sampled(draw, logits, rows)), ids_of(Sampler().sample(logits, rows))
        pairs = zip(*tokens, strict=True)
        numbers = uniforms([turn] * 32, list(range(32)))
        for row, (mine, other) in enumerate(pairs):
            if mine == other:
                continue
            num_different += 1
            up_to = (logits[row].double() / 0.9).softmax(0).cumsum(0)
            assert abs(float(up_to[min(mine, other)]) - numbers[row]) < 1e-7
    assert num_different <= 3


def test_rows_that_are_not_distributions_have_no_token(draw):
    logits = torch.randn(6, 500)
    logits[[1, 4], 7] = torch.nan
    tokens = sampled(draw, logits, rows_of(random.Random(1), 6, 0))
    assert [each.token_id < 0 for each in tokens] == [False, True, False, False, True, False]


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
