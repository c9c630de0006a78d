import random
from array import array

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sagellm.core import EngineError, LogitsProcessorMetrics, LogitsProcessorProtocol, LogitsRequest, pack
from sagellm.core.protocols.logits_processor import NullLogitsProcessor
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.random import philox, uniforms
from sagellm.engines.sampling.rows import BadLogitsError, SamplingRow
from sagellm.engines.sampling.sampler import Sampler

GREEDY = SamplingParams(temperature=0)
NO_IDS = torch.zeros(1, 1, dtype=torch.long)


def row(params=GREEDY, seed=0, position=0, prompt=(1, 2), output=(), states=()):
    return SamplingRow(params, seed, position, pack(list(prompt)), array("i", output), states)


class Forbidding(LogitsProcessorProtocol):
    """Forbids the ids that are its state."""

    def start(self, request):
        return request.extra_args.get("forbidden")

    def apply(self, logits, rows):
        assert logits.is_contiguous()
        for index, ids, _ in rows:
            logits[index, list(ids)] = -torch.inf

    def metrics(self):
        return LogitsProcessorMetrics()


def forbidding(*ids):
    return ((0, ids),)


def random_logits(rows, vocab_size, seed=0, spread=3.0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def distribution(logits, params):
    """The exact distribution of one row, by transformers' own filters and float64."""
    scores = logits[None] / params.temperature
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(NO_IDS, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(NO_IDS, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(NO_IDS, scores)
    return scores[0].double().softmax(0)


def random_params(rng):
    return SamplingParams(
        temperature=rng.choice([0.2, 0.7, 1.0, 1.0, 1.6]),
        top_k=rng.choice([0, 0, 1, 5, 50, 120, 400, 700, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.02, 0.3, 1.0]),
    )


def test_the_generator_gives_the_published_answers():
    # Known answers of Philox4x32-10 from Random123's kat_vectors.
    ones, digits = 0xFFFFFFFF, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    counters = np.array([[0] * 4, [ones] * 4, digits], dtype=np.uint64).T
    keys = np.array([[0, 0], [ones, ones], [0xA4093822, 0x299F31D0]], dtype=np.uint64).T
    assert philox(counters, keys).T.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_uniform_numbers_depend_on_seed_and_position_alone_and_are_uniform():
    seeds, positions = [7] * 20_000 + list(range(20_000)), list(range(20_000)) + [3] * 20_000
    numbers = uniforms(seeds, positions)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    from scipy import stats  # takes a second, in each worker

    for half in (numbers[:20_000], numbers[20_000:]):
        assert stats.kstest(half, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(half[:-1], half[1:])[0, 1]) < 0.03
    assert uniforms([7], [19_999])[0] == numbers[19_999]
    assert uniforms([-1], [0])[0] == uniforms([2**64 - 1], [0])[0] != uniforms([2**32 - 1], [0])[0]


@pytest.mark.parametrize("vocab_size", [1, 50, 128, 1000, 20_001])
def test_greedy_takes_the_first_of_the_largest(vocab_size):
    logits = random_logits(8, vocab_size).round()
    tokens = Sampler().sample(logits, [row() for _ in range(8)])
    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()
    assert all(token.logprob is None and token.top_logprobs is None for token in tokens)


def test_no_rows_give_no_tokens():
    assert Sampler().sample(torch.empty(0, 10), []) == []


def test_rows_and_logits_must_agree():
    with pytest.raises(EngineError, match="for 1 rows"):
        Sampler().sample(torch.zeros(2, 10), [row()])


@pytest.mark.parametrize("vocab_size", [6, 300, 1000, 20_001])
def test_a_token_is_the_inverse_of_the_cumulative_distribution_at_its_uniform_number(vocab_size):
    rng = random.Random(vocab_size)
    spreads = (0.5, 3.0, 6.0)
    for turn in range(12):
        logits = random_logits(16, vocab_size, seed=turn, spread=rng.choice(spreads))
        if turn % 2:
            logits = logits.to(torch.bfloat16).float()  # many ties
        rows = [row(random_params(rng), seed=turn, position=index) for index in range(16)]
        tokens = Sampler().sample(logits, rows)
        numbers = uniforms([turn] * 16, range(16))
        for index, each in enumerate(rows):
            if turn % 2 and each.params.top_p < 1.0:
                continue  # which of equal tokens transformers' top-p drops is chance
            up_to = distribution(logits[index], each.params).cumsum(0)
            expected = int((up_to <= numbers[index] * up_to[-1]).sum())
            assert tokens[index].token_id == expected, each.params


SETTINGS = {
    "whole": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=5, temperature=0.9),
    "min_p": SamplingParams(min_p=0.05),
    "top_p": SamplingParams(top_p=0.8),
    "wide top_p": SamplingParams(top_p=0.9, temperature=1.5),
    "all": SamplingParams(temperature=1.3, min_p=0.01, top_k=40, top_p=0.9),
}


@pytest.mark.parametrize(
    "name",
    [
        "hot",
        "top_p",
        "all",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("whole", "top_k", "min_p")),
    ],
)
def test_a_hundred_thousand_draws_follow_the_exact_distribution(name):
    params, batch, sampler = SETTINGS[name], 2000, Sampler()
    logits = random_logits(1, 200, seed=11, spread=1.5)
    counts = np.zeros(200)
    several = logits.expand(batch, -1).contiguous()
    for start in range(0, 100_000, batch):
        rows = [row(params, seed=42, position=start + index) for index in range(batch)]
        np.add.at(counts, [token.token_id for token in sampler.sample(several, rows)], 1)
    expected = distribution(logits[0], params).numpy() * 100_000
    assert counts[expected == 0].sum() == 0
    # Chi-square wants at least five a cell: the rarest share one.
    rare = expected < 5
    seen, wanted = (
        np.append(counts[~rare], counts[rare].sum()),
        np.append(expected[~rare], expected[rare].sum()),
    )
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    from scipy import stats

    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [1000, 20_001])
def test_one_seed_gives_equal_tokens_alone_and_in_a_batch_of_33_in_any_order(vocab_size):
    rng = random.Random(1)
    logits = random_logits(33, vocab_size, seed=2)
    rows = []
    for index in range(33):
        params = random_params(rng) if index % 4 else GREEDY
        if index % 5 == 0:
            params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2, top_p=0.9, logprobs=2)
        states = forbidding(*logits[index].topk(3).indices.tolist()) if index % 3 == 0 else ()
        rows.append(row(params, seed=index // 2, position=index, output=[1, 5, 5], states=states))
    sampler = Sampler([Forbidding()])
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[index : index + 1], rows[index : index + 1])[0] for index in range(33)]
    assert [each.token_id for each in alone] == [each.token_id for each in together]
    for _ in range(3):
        order = list(range(33))
        rng.shuffle(order)
        shuffled = sampler.sample(logits[order], [rows[index] for index in order])
        assert shuffled == [together[index] for index in order]


def test_another_seed_or_position_gives_other_tokens():
    logits = torch.zeros(64, 5000)
    params = SamplingParams()
    by_seed = Sampler().sample(logits, [row(params, seed=index) for index in range(64)])
    by_position = Sampler().sample(logits, [row(params, position=index) for index in range(64)])
    assert len({token.token_id for token in by_seed}) > 55
    assert len({token.token_id for token in by_position}) > 55


def test_masked_tokens_are_never_drawn():
    logits = torch.full((2000, 300), -torch.inf)
    logits[:, [0, 129, 131, 299]] = torch.tensor([-80.0, 0.0, 1.0, -80.0])
    for params in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(top_p=0.999)):
        tokens = Sampler().sample(logits, [row(params, position=index) for index in range(2000)])
        assert {token.token_id for token in tokens} == {129, 131}


@pytest.mark.parametrize("vocab_size", [3, 1000, 151_936])
def test_log_probs_are_those_of_the_raw_logits(vocab_size):
    logits = random_logits(3, vocab_size, spread=2.0)
    logits[1] += 50.0
    params = [
        SamplingParams(temperature=0.3, top_k=2, logprobs=20),
        SamplingParams(temperature=0, logprobs=0, repetition_penalty=5.0, seed=1),
        SamplingParams(logprobs=3, presence_penalty=2.0),
    ]
    tokens = Sampler().sample(logits, [row(each, seed=3, output=[1]) for each in params])
    expected = torch.log_softmax(logits.double(), -1)
    for index, token in enumerate(tokens):
        assert token.logprob == pytest.approx(expected[index, token.token_id].item(), abs=1e-5)
        assert abs(token.logprob - torch.log_softmax(logits, -1)[index, token.token_id].item()) < 1e-5
        count = min(params[index].logprobs, vocab_size)
        ids, values = zip(*token.top_logprobs, strict=True) if count else ((), ())
        assert list(ids) == expected[index].topk(count).indices.tolist()
        assert list(values) == pytest.approx(expected[index, list(ids)].tolist(), abs=1e-5)


def test_only_rows_that_ask_get_log_probs():
    tokens = Sampler().sample(torch.zeros(2, 10), [row(), row(SamplingParams(logprobs=1))])
    assert tokens[0].logprob is None
    assert len(tokens[1].top_logprobs) == 1


def test_penalties_and_processors_change_the_choice_but_not_the_logits():
    logits = torch.tensor([[0.0, 3.0, 2.9, 1.0]] * 4)
    before = logits.clone()
    rows = [
        row(),
        row(SamplingParams(temperature=0, presence_penalty=1.0), output=[1]),
        row(states=forbidding(1, 2)),
        row(SamplingParams(temperature=1.0, top_k=1, logprobs=1), states=forbidding(1)),
    ]
    tokens = Sampler([Forbidding()]).sample(logits, rows)
    assert [token.token_id for token in tokens] == [1, 2, 3, 2]
    assert torch.equal(logits, before)
    # Log-probabilities are those before the processors: the forbidden token is the likeliest.
    assert (tokens[3].rank, tokens[3].top_logprobs[0][0]) == (2, 1)


def test_processors_come_in_order_after_the_penalties():
    seen = []

    class Watching(Forbidding):
        def apply(self, logits, rows):
            seen.append((self, logits[rows[0].row].tolist(), rows[0].output_token_ids.tolist()))
            super().apply(logits, rows)

    first, second = Watching(), Watching()
    params = SamplingParams(temperature=0.5, presence_penalty=1.0)
    states = ((0, (0,)), (1, (1,)))
    Sampler([first, second]).sample(torch.tensor([[4.0, 3.0, 2.0]]), [row(params, output=[0], states=states)])
    assert seen == [(first, [3.0, 3.0, 2.0], [0]), (second, [-torch.inf, 3.0, 2.0], [0])]


def test_only_processors_that_a_sequence_asks_for_have_a_state():
    sampler = Sampler([NullLogitsProcessor(), Forbidding(), Forbidding()])
    assert sampler.start(LogitsRequest()) == ()
    assert sampler.start(LogitsRequest(extra_args={"forbidden": [3]})) == ((1, [3]), (2, [3]))


def test_rows_without_a_state_never_reach_a_processor():
    shapes = []

    class Counting(Forbidding):
        def apply(self, logits, rows):
            shapes.append(tuple(logits.shape))

    rows = [row(states=forbidding(1) if index == 7 else ()) for index in range(33)]
    Sampler([Counting()]).sample(torch.zeros(33, 10), rows)
    assert shapes == [(1, 10)]  # the others were not even copied


@pytest.mark.parametrize("vocab_size", [5, 20_001])
def test_a_rank_counts_the_tokens_that_are_at_least_as_likely(vocab_size):
    logits = random_logits(9, vocab_size).round()  # ties
    rows = [row(SamplingParams(temperature=3.0, logprobs=0), seed=index) for index in range(9)]
    for index, token in enumerate(Sampler().sample(logits, rows)):
        assert token.rank == int((logits[index] >= logits[index, token.token_id]).sum())


def test_known_tokens_are_scored_as_sampled_ones_are(monkeypatch):
    logits = random_logits(40, 1000)
    params = SamplingParams(logprobs=3)
    sampled = Sampler().sample(logits, [row(params, seed=index) for index in range(40)])
    monkeypatch.setattr("sagellm.engines.sampling.torch_sampler._CHUNK_ELEMENTS", 3000)
    scores = Sampler().score(logits, [token.token_id for token in sampled], 3)
    for token, score in zip(sampled, scores, strict=True):
        assert (token.logprob, *(value for _, value in token.top_logprobs)) == score.values
        assert (token.rank, [token_id for token_id, _ in token.top_logprobs]) == (
            score.rank,
            [*score.top_ids],
        )
    logits[7, 3] = torch.nan
    with pytest.raises(BadLogitsError, match="row 7"):
        Sampler().score(logits, [5] * 40, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab_size", [10, 1000])
def test_rows_that_are_no_distribution_are_named(bad, vocab_size):
    every = [SamplingParams(temperature=0), *SETTINGS.values(), SamplingParams(top_k=600, logprobs=1)]
    logits = random_logits(2 * len(every), vocab_size)
    logits[1::2, vocab_size // 2] = bad
    rows = [row(params) for params in every for _ in range(2)]
    with pytest.raises(BadLogitsError, match="row 1, 3, 5") as caught:
        Sampler().sample(logits, rows)
    assert caught.value.rows == tuple(range(1, 2 * len(every), 2))


def test_the_extremes_of_temperature_draw_from_the_distribution_too():
    logits = torch.tensor([[-torch.inf, 3e4, -3e4, 2e4]] * 64)
    for others in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.001}):
        for temperature, expected in ((1.1e-5, {1}), (1e6, {1, 2, 3})):
            params = SamplingParams(temperature=temperature, **others)
            tokens = Sampler().sample(logits, [row(params, seed=index) for index in range(64)])
            assert {token.token_id for token in tokens} == expected


def test_a_row_with_nothing_left_to_choose_is_an_error():
    for params in (GREEDY, *SETTINGS.values()):
        with pytest.raises(BadLogitsError, match="row 1 of"):
            Sampler([Forbidding()]).sample(
                torch.zeros(2, 3), [row(params), row(params, states=forbidding(0, 1, 2))]
            )


def test_a_large_batch_is_sampled_in_parts_as_if_in_one(monkeypatch):
    logits = random_logits(20, 1000)
    rows = [row(SamplingParams(logprobs=1), seed=index) for index in range(20)]
    whole = Sampler().sample(logits, rows)
    monkeypatch.setattr("sagellm.engines.sampling.torch_sampler._CHUNK_ELEMENTS", 3000)
    assert Sampler().sample(logits, rows) == whole


def test_other_float_types_and_strides_are_taken_too():
    logits = random_logits(4, 600).to(torch.bfloat16)
    rows = [row(SamplingParams(top_p=0.5), seed=index) for index in range(4)]
    assert Sampler().sample(logits, rows) == Sampler().sample(logits.float(), rows)
    wide = random_logits(4, 700)
    assert Sampler().sample(wide[:, :600], rows) == Sampler().sample(wide[:, :600].clone(), rows)


@pytest.mark.cuda
def test_a_cuda_device_draws_what_the_cpu_draws():
    logits = random_logits(33, 20_001)
    rng = random.Random(4)
    rows = [row(random_params(rng), seed=index) for index in range(33)]
    on_cpu = Sampler().sample(logits, rows)
    assert [each.token_id for each in Sampler().sample(logits.cuda(), rows)] == [
        each.token_id for each in on_cpu
    ]
