import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from sagellm.core import InvalidRequestError
from sagellm.engines.sampling.params import MAX_LOGPROBS, MAX_N, SamplingParams


def test_the_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert not params.is_greedy
    assert not params.has_penalties


WRONG = {
    "n": [0, -1, MAX_N + 1, 10**9, True, 1.0, "1", None],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, 1e7, "hot", None, True, 10**400],
    "top_p": [0, -0.5, 1.01, math.nan, math.inf, None],
    "top_k": [-2, 1.5, True, None, 2**40],
    "min_p": [-0.1, 1.1, math.nan],
    "seed": [2**63, -(2**63) - 1, 1.5, True, "7"],
    "stop": ["", ["a", ""], [1], 7, b"bytes", ["x"] * 65, "x" * 1025, {"a": 1}.values],
    "stop_token_ids": [[-1], [1.5], [True], "12", 3, [2**31], range(2000)],
    "max_tokens": [0, -5, 1.5, True, "16"],
    "min_tokens": [-1, None, 17],
    "logprobs": [-1, MAX_LOGPROBS + 1, True, 1.5],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, True, 1.5],
    "logit_bias": [
        *({1: 100.5}, {1: -101}, {1: math.nan}, {1: "5"}, {1: True}, {-1: 1.0}, {"a": 1.0}, {1.5: 1.0}),
        *({True: 1.0}, [1], "x", dict.fromkeys(range(1025), 1.0)),
    ],
    "allowed_token_ids": [[], [-1], [1.5], [True], "12", 3, [2**31]],
    "bad_words": ["", ["a", ""], [1], 7, b"bytes", ["x"] * 1025, "x" * 1025],
    "bad_words_token_ids": [[[]], [[1], []], [1], [[-1]], "x", 5, [[1]] * 2049],
    "extra_args": [[1], "x", {1: 2}],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "repetition_penalty": [0, -1.0, 1e-300, math.nan, math.inf],
    "ignore_eos": [1, None, "yes"],
    "detokenize": [0],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [2],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_an_error_that_names_the_key(key, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{key: value})
    assert key in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_error_says_the_value_and_what_is_possible():
    with pytest.raises(
        InvalidRequestError, match=r"top_p is 1.5; it must be a finite number above 0 and at most 1"
    ):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidRequestError, match=r"n is 0; it must be an integer from 1 to 128"):
        SamplingParams(n=0)
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 9; it must not be above max_tokens \(4\)"):
        SamplingParams(min_tokens=9, max_tokens=4)


def test_edges_of_every_range_are_accepted():
    SamplingParams(
        n=MAX_N, temperature=0, top_p=1, min_p=1, seed=-(2**63), logprobs=MAX_LOGPROBS, max_tokens=None
    )
    SamplingParams(
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-9, seed=2**63 - 1, logprobs=0
    )
    SamplingParams(min_tokens=16, max_tokens=16, top_p=1e-9, stop=["x"] * 64, temperature=1e6)
    SamplingParams(min_tokens=10**6, max_tokens=None)


def test_values_are_kept_in_one_form():
    params = SamplingParams(
        top_k=-1, stop="end", stop_token_ids=[np.int64(3)], temperature=1, top_p=Fraction(1, 2)
    )
    assert params.top_k == 0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)
    assert type(params.stop_token_ids[0]) is int
    assert (type(params.temperature), params.top_p) == (float, 0.5)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_params_are_frozen_hashable_and_keyword_only():
    params = SamplingParams(stop=["a", "b"])
    assert hash(params) == hash(SamplingParams(stop=("a", "b")))
    with pytest.raises(AttributeError):
        params.n = 2
    with pytest.raises(TypeError):
        SamplingParams(1)


def test_a_temperature_that_cannot_be_divided_by_is_greedy():
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-40).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {5: 1.0, 100: 1.0}),
        ("allowed_token_ids", [5, 100]),
        ("bad_words_token_ids", [[5], [7, 100]]),
    ],
)
def test_tokens_that_a_model_does_not_know_are_named(name, value):
    params = SamplingParams(**{name: value})
    params.validate_for(101)
    with pytest.raises(InvalidRequestError, match=rf"{name} has 100, .* 0 to 99"):
        params.validate_for(100)


def test_lists_and_mappings_are_kept_in_one_form():
    params = SamplingParams(
        logit_bias={np.int64(3): 1},
        allowed_token_ids=range(3),
        bad_words="no",
        bad_words_token_ids=[[1, np.int64(2)]],
        extra_args={"rule": 1},
    )
    assert params.logit_bias == {3: 1.0}
    assert (params.allowed_token_ids, params.bad_words) == ((0, 1, 2), ("no",))
    assert params.bad_words_token_ids == ((1, 2),)
    assert hash(params) == hash(replace(params))
    assert SamplingParams(logit_bias={}, bad_words=None, extra_args={}) == SamplingParams()


def test_unknown_stop_tokens_are_refused_for_a_model():
    params = SamplingParams(stop_token_ids=[5, 100])
    params.validate_for(101)
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids has 100, .* 0 to 99"):
        params.validate_for(100)


def test_stop_strings_without_text_are_refused():
    with pytest.raises(InvalidRequestError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
