from __future__ import annotations

import pytest

import sagellm.engines.requests.input_processor
from sagellm.core import InvalidRequestError, Runtime
from sagellm.engines import InputProcessor, SamplingParams
from sagellm.engines.requests.input_processor import RequestLimits
from sagellm.engines.testing import make_tokenizer

LIMITS = RequestLimits(
    vocab_size=1024,
    max_model_len=64,
    max_model_len_reason="the test",
    num_blocks=8,
    block_size=4,
    eos_token_ids=frozenset({2}),
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def processor(tokenizer):
    return InputProcessor(tokenizer, LIMITS, Runtime.virtual())


def test_text_becomes_sequences_and_back(processor):
    params = SamplingParams(n=2, stop_token_ids=[7])
    processed = processor.process_request("The clock", params, request_id="a")
    assert processed.request_id == "a"
    assert processor.decode_tokens(processed.request.token_ids) == "The clock"
    assert [sequence.stop_token_ids for sequence in processed.sequences] == [{2, 7}] * 2
    first, second = processed.sequences
    assert first.sequence_id != second.sequence_id
    assert first.seed != second.seed


def test_requests_are_checked_together_and_each_gets_its_parameters(processor):
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5, ignore_eos=True)]
    first, second = processor.process_requests([[5, 6], "The"], params)
    assert [one.request.max_tokens for one in (first, second)] == [3, 5]
    assert first.request_id != second.request_id
    assert second.sequences[0].stop_token_ids == set()
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        processor.process_requests([[5, 6], []], params)


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": [9], "bad_words_token_ids": [[9]]},
        {"allowed_token_ids": [2], "min_tokens": 3},
        {"allowed_token_ids": [9, 11], "stop_token_ids": [9], "min_tokens": 1, "bad_words_token_ids": [[11]]},
    ],
)
def test_at_least_one_token_must_remain(processor, settings):
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: each of them is banned"):
        processor.process_request([5], SamplingParams(**settings))
    some = {**settings, "allowed_token_ids": [*settings["allowed_token_ids"], 12]}
    assert processor.process_request([5], SamplingParams(**some)).params.allowed_token_ids


def test_prompts_that_share_parameters_have_their_bad_words_read_once(processor, monkeypatch):
    calls = []
    real = sagellm.engines.requests.input_processor.bad_words_token_ids

    def count(words, tokenizer):
        calls.append(words)
        return real(words, tokenizer)

    monkeypatch.setattr("sagellm.engines.requests.input_processor.bad_words_token_ids", count)
    params = SamplingParams(bad_words=["The"], max_tokens=2)
    made = [processor.process_request([5, 6], params).params for _ in range(3)]
    assert len(calls) == 1
    assert made[0].bad_words_token_ids == made[2].bad_words_token_ids != ()
    other = processor.process_request([5, 6], SamplingParams(bad_words=["clock"], max_tokens=2)).params
    assert other.bad_words_token_ids != made[0].bad_words_token_ids


# The pool holds 32 tokens; the last one generated needs no place in it.
@pytest.mark.parametrize(
    ("num_prompt", "asked", "given"), [(10, None, 23), (10, 23, 23), (10, 5, 5), (32, None, 1)]
)
def test_the_limit_is_what_model_and_pool_leave(processor, num_prompt, asked, given):
    processed = processor.process_request([5] * num_prompt, SamplingParams(max_tokens=asked))
    assert processed.request.max_tokens == given


@pytest.mark.parametrize(("num_prompt", "asked"), [(33, None), (10, 24), (32, 2)])
def test_what_the_pool_could_never_hold_is_refused(processor, num_prompt, asked):
    with pytest.raises(InvalidRequestError, match="need 9 KV blocks of 4 tokens, there are 8"):
        processor.process_request([5] * num_prompt, SamplingParams(max_tokens=asked))


def test_a_request_without_parameters_gets_the_checkpoints(make_engine):
    engine = make_engine()
    assert engine.default_params == SamplingParams(temperature=0.0)  # generation_config.json: do_sample false
    ours, theirs = engine.generate([[5, 6, 7]] * 2, None)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
