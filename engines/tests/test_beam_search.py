"""Beam search finds what transformers finds, and what an exhaustive search would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sagellm.core import InvalidRequestError
from sagellm.engines import BeamSearchParams, SamplingParams

PROMPTS = ([5, 6, 7], list(range(20, 60)), [9])


@pytest.fixture(scope="module")
def engine(make_engine):
    with make_engine(num_blocks=256) as made:
        yield made


@pytest.mark.parametrize("width", [1, 3, 10])
def test_it_finds_the_sequences_of_transformers(engine, checkpoint, width):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
    for prompt, found in zip(PROMPTS, engine.beam_search(PROMPTS, params), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [sequence.tokens for sequence in found.sequences] == expected.tolist()
        assert {sequence.finish_reason for sequence in found.sequences} == {"length"}


def test_a_sequence_that_ends_is_ranked_with_its_end(engine, monkeypatch):
    first = engine.generate([5, 6], SamplingParams(max_tokens=1, temperature=0.0, logprobs=4))[0].outputs[0]
    likely = list(first.logprobs[0])
    processor = engine.driver.input
    monkeypatch.setattr(processor, "limits", replace(processor.limits, eos_token_ids=frozenset({likely[1]})))
    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.0)
    (found,) = engine.beam_search([5, 6], params)
    (ended,) = [each for each in found.sequences if each.tokens == [5, 6]]
    assert ended.finish_reason == "stop"
    assert ended.cum_logprob == pytest.approx(first.logprobs[0][likely[1]].logprob, abs=1e-5)
    scores = [each.cum_logprob for each in found.sequences]
    assert scores == sorted(scores, reverse=True)


def test_a_text_has_its_prompt_as_in_vllm(engine):
    (found,) = engine.beam_search("the port", BeamSearchParams(beam_width=2, max_tokens=2))
    for sequence in found.sequences:
        assert sequence.text == engine.driver.input.decode_tokens(sequence.tokens)
        assert sequence.text.startswith("the port")


def test_its_later_steps_compute_little_of_the_prompt(engine):
    prompt = list(range(100, 180))
    before = engine.metrics().modules["prefix_cache"]
    engine.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
    after = engine.metrics().modules["prefix_cache"]
    num_found = after.num_hit_tokens - before.num_hit_tokens
    assert num_found >= 6 * 64, "six of the seven beams are found up to their last block"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beam_width": 11}, "beam_width is 11; it must be an integer from 1 to 10"),
        ({"beam_width": 0}, "beam_width is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
    ],
)
def test_wrong_parameters_are_named(options, says):
    with pytest.raises(InvalidRequestError, match=says):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **options})


def test_wrong_arguments_leave_nothing_behind(engine):
    for arguments in (
        ([[5]], SamplingParams()),
        ([[5], [10**7]], BeamSearchParams(beam_width=2, max_tokens=2)),
    ):
        with pytest.raises(InvalidRequestError):
            engine.beam_search(*arguments)
    assert not engine.has_unfinished_requests()
