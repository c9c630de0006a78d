"""Tokens drawn on a device are those that the sampler draws."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from sagellm.core import LogitsRequest, pack
from sagellm.engines import EngineConfig, LLMEngine
from sagellm.engines.sampling import draws, mass_cut
from sagellm.engines.sampling.draws import IN_PROMPT, edits_of
from sagellm.engines.sampling.inverse_cdf import padded
from sagellm.engines.sampling.logprobs import with_logprobs
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.processors import LogitBias
from sagellm.engines.sampling.random import uniforms
from sagellm.engines.sampling.rows import SamplingRow
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.sampling.token_logprobs import token_logprobs
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.worker.device_changes import DeviceCounts, PenalisedRow, PlannedChanges

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
NUM_ROWS = 4


def drawn(logits, params, seed, first=0):
    """Draw with the random numbers of rows from `first` on."""
    from sagellm.accel.cuda.sampling import draw_tokens

    numbers = uniforms([seed] * len(logits), list(range(first, first + len(logits))))
    settings = [
        [each.temperature, each.min_p, each.top_k, mass_cut.dropped_share(each.top_p), number]
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
@pytest.mark.parametrize(
    ("vocab_size", "sharpness"),
    [
        (515, 2.0),
        pytest.param(9000, 4.0, marks=pytest.mark.full),
        pytest.param(9000, 0.01, marks=pytest.mark.full),
    ],
)
def test_a_draw_is_the_samplers(kind, vocab_size, sharpness):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * sharpness
    params = [SamplingParams(**kind)] * NUM_ROWS
    assert drawn(logits, params, -7) == sampled(logits, params, -7)


@pytest.mark.parametrize("seed", [5, pytest.param(6, marks=pytest.mark.full)])
def test_equal_logits_are_dropped_in_the_same_order(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (len(KINDS), 700), generator=generator).float()
    params = [SamplingParams(**kind) for kind in KINDS]
    assert drawn(logits, params, 3) == sampled(logits, params, 3)


@pytest.mark.full
def test_rows_of_a_batch_may_differ():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(KINDS), 3000, generator=generator) * 3
    params = [SamplingParams(**kind) for kind in KINDS]
    together = drawn(logits, params, 9)
    assert together == sampled(logits, params, 9)
    alone = [drawn(logits[[row]], [params[row]], 9, first=row)[0] for row in range(len(KINDS))]
    assert alone == together


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_distribution_is_minus_one(value):
    logits = torch.randn(len(KINDS), 600)
    logits[:, 300] = value
    assert drawn(logits, [SamplingParams(**kind) for kind in KINDS], 0) == [-1] * len(KINDS)
    assert drawn(torch.full((1, 600), -torch.inf), [SamplingParams()], 0) == [-1]


@pytest.mark.full
def test_masked_tokens_are_never_drawn():
    logits = torch.full((len(KINDS), 600), -torch.inf)
    logits[:, [5, 130, 599]] = torch.tensor([1.0, 2.0, 0.5])
    params = [SamplingParams(**kind) for kind in KINDS]
    assert drawn(logits, params, 2) == sampled(logits, params, 2)


def scored(logits, tokens, rows, num_top):
    from sagellm.accel.cuda.sampling import token_logprobs

    placed = torch.tensor([rows, list(range(len(tokens)))])
    given = [each.to(DEVICE) for each in (logits, torch.tensor(tokens), placed)]
    return token_logprobs(*given, num_top).cpu().numpy()


@pytest.mark.parametrize("vocab_size", [7, 700, pytest.param(9000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["random", "ties", "masked"])
def test_log_probabilities_are_those_of_float64_and_of_the_sampler(vocab_size, kind):
    """With ranks, and the likeliest tokens; of equal ones those with the lowest ids."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[:, ::2] = -torch.inf
    rows, tokens, num_top = [4, 0, 2], [1, vocab_size - 1, 5], min(20, vocab_size)
    found = scored(logits, tokens, rows, num_top)
    exact = torch.log_softmax(logits.double(), 1).numpy()
    for row, token, columns in zip(rows, tokens, found, strict=True):
        ids = np.lexsort((np.arange(vocab_size), -exact[row]))[:num_top]
        assert columns[2 + num_top :].tolist() == ids.tolist()
        np.testing.assert_allclose(columns[2 : 2 + num_top], exact[row, ids], atol=1e-6)
        assert columns[0] == pytest.approx(exact[row, token], abs=1e-6)
        assert columns[1] == (logits[row] >= logits[row, token]).sum()
    picked = logits[rows]
    scratch = torch.empty(len(rows) * padded(vocab_size))
    theirs = token_logprobs(picked, torch.tensor(tokens), num_top, scratch).numpy()
    np.testing.assert_allclose(found[:, : 2 + num_top], theirs[:, : 2 + num_top], atol=1e-5)
    for mine, other, token in zip(found, theirs, tokens, strict=True):
        mine, other = (with_logprobs(token, columns, num_top) for columns in (mine, other))
        last = mine.top_logprobs[-1][1]  # of those that tie for the last places the sampler takes any
        ids_of = [[each for each, value in one.top_logprobs if value > last + 1e-5] for one in (mine, other)]
        assert ids_of[0] == ids_of[1]


def test_log_probabilities_of_a_row_that_is_not_a_distribution_harm_no_other():
    logits = torch.randn(2, 300)
    logits[0, 200] = torch.nan
    found = scored(logits, [-1, 3], [0, 1], 4)
    assert found[1].tolist() == scored(logits, [-1, 3], [1, 1], 4)[1].tolist()


def random_mask(generator, vocab_size):
    bits = generator.random(-(-vocab_size // 32) * 32) < 0.6
    return np.packbits(bits, bitorder="little").view("<u4")


@pytest.mark.parametrize("vocab_size", [70, 5000])
def test_changes_of_logits_are_the_samplers_to_the_last_bit(vocab_size):
    """Penalties before and after drafts and late tokens, biases, forbidden tokens and masks."""
    from sagellm.accel.cuda.sampling import TritonDraw

    generator = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(generator.standard_normal((6, vocab_size), np.float32) * 3)
    logits[1, 5] = -torch.inf
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.37, presence_penalty=-0.21),
        SamplingParams(),
        SamplingParams(repetition_penalty=0.7, frequency_penalty=-1.1, presence_penalty=0.3),
        SamplingParams(logit_bias={5: 2.5, 7: -100.0}),
        SamplingParams(),
    ]
    prompts = [generator.integers(0, vocab_size + 5, 20).tolist() for _ in params]
    outputs = [generator.integers(0, vocab_size, 9).tolist() for _ in params]
    outputs[1] += outputs[1][:4]
    drafts = [[], outputs[1][:2], [], [3, 3], [], []]
    late = torch.tensor([vocab_size - 1] * 6)
    masks = {row: random_mask(generator, vocab_size) for row in (1, 2, 4)}
    counts, changes = DeviceCounts(TritonDraw(), DEVICE, vocab_size), PlannedChanges()
    penalised = [
        PenalisedRow(
            row,
            seat=row + 1,
            generation=1,
            params=params[row],
            prompt_token_ids=pack(prompts[row]),
            output_token_ids=np.array(outputs[row], np.int32),
            has_late_token=row == 3,
            drafts=drafts[row],
        )
        for row in (0, 1, 3)
    ]
    last = torch.cat((late[:1], late)).to(DEVICE)
    for row, counts_row in zip(penalised, counts.count(penalised, last), strict=True):
        changes.penalise(row, counts_row)
    changes.edit(4, [edits_of([5, 7], [2.5, -100.0]), edits_of([7, 9, 9])])
    changed = logits.clone().to(DEVICE)
    TritonDraw().change(changed, changes.upload(dict(masks), counts.counts, vocab_size))

    outputs[3].append(vocab_size - 1)
    rows = [
        SamplingRow(each, 0, 0, pack(prompts[row]), outputs[row] + drafts[row], mask=masks.get(row))
        for row, each in enumerate(params)
    ]
    bias = LogitBias(vocab_size)
    rows[4].states = ((0, bias.start(LogitsRequest(logit_bias=params[4].logit_bias))),)
    expected = Sampler([bias]).changed(logits, list(range(6)), rows)
    expected[4, [7, 9]] = -torch.inf
    assert torch.equal(changed.cpu(), expected)
    assert torch.equal(changed[5].cpu(), logits[5])


def test_counts_follow_a_sequence_and_begin_again_with_another():
    from sagellm.accel.cuda.sampling import TritonDraw

    counts, last = DeviceCounts(TritonDraw(), DEVICE, 10), torch.tensor([0, 7]).to(DEVICE)

    def counted(output, *, late=False, generation=1, repetition=1.0):
        params = SamplingParams(repetition_penalty=repetition, presence_penalty=1.0)
        ids = np.array(output, np.int32)
        row = PenalisedRow(0, 1, generation, params, pack([4, 12]), ids, late, [])
        (place,) = counts.count([row, row], last)[:1]  # two positions of a row count once
        return counts.counts[place].tolist()

    assert counted([1, 1]) == [0, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert counted([1, 1], late=True) == [0, 2, 0, 0, 0, 0, 0, 1, 0, 0]
    assert counted([1, 1, 7]) == [0, 2, 0, 0, 0, 0, 0, 1, 0, 0]
    assert counted([1, 1, 7, 3]) == [0, 2, 0, 1, 0, 0, 0, 1, 0, 0]
    assert counted([1]) == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]  # a step is computed again
    assert counted([2], generation=2, repetition=1.5) == [0, 0, 1, 0, IN_PROMPT, 0, 0, 0, 0, 0]


@pytest.mark.full
@pytest.mark.skipif(DEVICE.type == "cuda", reason="other bits of logits on a GPU may draw other tokens")
def test_an_engine_that_leaves_tokens_with_the_kernels_gives_the_samplers(tmp_path, monkeypatch):
    """Penalties, biases, allowed tokens, bad words and log-probabilities, with a step in flight."""
    from sagellm.accel.cuda.sampling import TritonDraw

    checkpoint = make_checkpoint(tmp_path, num_hidden_layers=1)
    kinds = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"frequency_penalty": 0.7, "presence_penalty": 0.2, "top_k": 20},
        {"allowed_token_ids": list(range(5, 200, 3)), "logit_bias": {8: 3.0, 11: -5.0}, "logprobs": 0},
        {"bad_words_token_ids": [[7], [8, 11]], "min_tokens": 3, "logit_bias": {8: 6.0, 11: 6.0}},
    ]
    params = [
        SamplingParams(seed=seed, max_tokens=5, ignore_eos=True, **kind) for seed, kind in enumerate(kinds)
    ]
    changes = []
    change = TritonDraw.change
    monkeypatch.setattr(TritonDraw, "change", lambda *given: changes.append(given[2]) or change(*given))

    def answers(draw, executor):
        monkeypatch.setattr(draws, "device_draw", lambda device: draw)
        engine = LLMEngine(
            EngineConfig(
                model={"name": str(checkpoint), "device": "cpu"},
                kv={"num_blocks": 40, "block_size": 8},
                forward={"executor": executor},
            )
        )
        outputs = [each.outputs[0] for each in engine.generate([[5, 6, 7, 8, 6]] * 4, params)]
        engine.close()
        logprobs = [
            [(each.rank, round(each.logprob, 4)) for entry in one.logprobs or () for each in entry.values()]
            for one in outputs
        ]
        return [one.token_ids for one in outputs], logprobs

    assert answers(TritonDraw(), "overlapped") == answers(None, "inline")
    assert len(changes) >= 5
