from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from sagellm.core import pack
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.penalties import apply_penalties
from sagellm.engines.sampling.sequence_penalties import SequencePenalties

VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB + 3), max_size=30)
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
)


def reference(row, params, prompt, output):
    row = [float(value) for value in row]
    for token in set(prompt) | set(output):
        if token < VOCAB:
            factor = params.repetition_penalty
            row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
    for token in set(output):
        if token < VOCAB:
            row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(PARAMS, TOKENS, TOKENS), min_size=1, max_size=5), st.integers(0, 1000))
def test_penalties_equal_a_plain_reference(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = [reference(row, *entry) for row, entry in zip(logits.tolist(), rows, strict=True)]
    params, prompts, outputs = zip(*rows, strict=True)
    apply_penalties(
        logits, params, [pack(prompt) for prompt in prompts], [array("i", out) for out in outputs]
    )
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_repetition_equals_transformers():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[3, 3, 7, 39, 0]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits)
    ours = apply_penalties(
        logits.clone(), [SamplingParams(repetition_penalty=1.7)], [pack([3, 3, 7])], [[39, 0]]
    )
    assert torch.equal(ours, expected)


def test_rows_without_penalties_keep_their_logits():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = [SamplingParams(), SamplingParams(frequency_penalty=1.0)]
    apply_penalties(logits, params, [pack([1, 2])] * 2, [[4, 4]] * 2)
    assert torch.equal(logits[0], before[0])
    assert logits[1, 4] == pytest.approx(before[1, 4].item() - 2.0, abs=1e-6)
    assert (logits[1] != before[1]).sum() == 1


def test_an_output_that_was_read_may_still_grow():
    output = array("i", [1, 2])
    apply_penalties(torch.zeros(1, VOCAB), [SamplingParams(presence_penalty=1.0)], [pack([1])], [output])
    output.append(3)
    assert output[-1] == 3


def test_masked_tokens_stay_masked():
    logits = torch.full((1, VOCAB), -torch.inf)
    params = [SamplingParams(repetition_penalty=0.5, frequency_penalty=-1.0)]
    apply_penalties(logits, params, [pack([1])], [[2, 2]])
    assert torch.isneginf(logits).all()


def edited(logits, edits):
    """Make edits one after the other in float32, as a kernel does."""
    changed = logits.clone()
    for token, factor, addend in edits:
        value = changed[int(token)]
        scale = torch.tensor(float(factor))
        changed[int(token)] = (value * scale if value < 0 else value / scale) + float(addend)
    return changed


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.37, "presence_penalty": -0.21},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.9, "presence_penalty": 0.4},
    ],
    ids=str,
)
def test_penalties_kept_as_tokens_come_are_those_made_at_once(penalties):
    """Also after drafts, which are forgotten again, and when a step is computed once more."""
    rng = np.random.default_rng(5)
    params = SamplingParams(**penalties)
    prompt = pack(rng.integers(0, 210, 40).tolist())
    logits = torch.from_numpy(rng.standard_normal(200, np.float32) * 4)

    def expected(output):
        return apply_penalties(logits[None].clone(), [params], [prompt], [output])[0]

    kept, output = SequencePenalties(params, prompt, 200), []
    for turn in range(80):
        output += rng.integers(0, 203, rng.integers(1, 4)).tolist()
        if turn % 9 == 8:
            del output[-5:]
        drafts = rng.integers(0, 203, rng.integers(0, 5)).tolist()
        if turn % 5 == 0 and drafts:
            drafts += [drafts[0], output[-1]]
        found = kept.after_each(np.array(output, np.int32), drafts)
        assert len(found) == len(drafts) + 1
        for count, edits in enumerate(found):
            assert torch.equal(edited(logits, edits), expected(output + drafts[:count]))
