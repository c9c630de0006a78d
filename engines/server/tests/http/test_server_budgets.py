"""What a body asks for in all is bounded; errors say what was given, what is allowed and what to do."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from sagellm.engines import SamplingParams
from sagellm.server.http.body_params import (
    MAX_LOGPROB_ENTRIES,
    MAX_PARAMETER_TOKENS,
    check_budget,
    completion_params,
)
from sagellm.server.http.body_schema import ChatBody, CompletionBody
from sagellm.server.http.errors import APIError
from sagellm.server.http.parsing import parse_now
from sagellm.server.http.prompt_encoder import PromptEncoder


def told(caught, param):
    assert (caught.value.status, caught.value.param) == (400, param)
    return caught.value.message


def test_log_probabilities_of_a_prompt_are_bounded():
    with pytest.raises(APIError) as caught:
        check_budget(SamplingParams(prompt_logprobs=20), 1, 100_000, 200_000)
    assert told(caught, "prompt_logprobs") == (
        "prompt_logprobs: 20 and the token itself for 100000 prompt tokens are 2100000 log-probabilities; "
        f"there may be at most {MAX_LOGPROB_ENTRIES}: lower prompt_logprobs or n, or send fewer or shorter "
        "prompts"
    )


def test_log_probabilities_of_a_prompt_and_of_the_output_have_one_budget():
    params = SamplingParams(prompt_logprobs=9, logprobs=9, max_tokens=100_000)
    check_budget(params, 1, 100_000, 200_000)
    with pytest.raises(APIError) as caught:
        check_budget(params, 1, 110_000, 200_000, scored_by="logprobs")
    assert told(caught, "logprobs") == (
        "logprobs: 9 and the token itself for 110000 prompt tokens are 1100000 log-probabilities, and up to "
        f"1000000 of the output; there may be at most {MAX_LOGPROB_ENTRIES}: lower logprobs or n, or send "
        "fewer or shorter prompts"
    )


def test_log_probabilities_of_a_prompt_count_for_each_continuation():
    check_budget(SamplingParams(prompt_logprobs=20), 1, 8000, 9000)
    with pytest.raises(APIError) as caught:
        check_budget(SamplingParams(prompt_logprobs=20, n=100), 1, 8000, 9000, times_scored=100)
    assert told(caught, "prompt_logprobs").startswith(
        "prompt_logprobs: 20 and the token itself for 800000 prompt tokens are 16800000 log-probabilities"
    )


WORDS = {"bad_words_token_ids": [[7] * 500] * 128, "logit_bias": {9: 1.0}}


@pytest.mark.parametrize(
    ("given", "param", "told_sizes"),
    [
        (WORDS, "bad_words", "64001 tokens in bad_words, logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1024), 1.0)}, "logit_bias", "1024 tokens in logit_bias"),
        ({"allowed_token_ids": range(5000)}, "allowed_token_ids", "5000 tokens in allowed_token_ids"),
        ({"stop_token_ids": range(1024)}, "stop_token_ids", "1024 tokens in stop_token_ids"),
    ],
)
def test_the_tokens_of_parameters_are_bounded_by_continuations(given, param, told_sizes):
    """400 prompts with 64 bad words of 1,024 letters once kept another key waiting for half a minute."""
    params = SamplingParams(max_tokens=1, n=2, **given)
    size = int(told_sizes.split()[0])
    most = MAX_PARAMETER_TOKENS // size // 2
    check_budget(params, min(most, 512), 1, 100)
    if most > 512:
        return  # as many continuations as there may be have no more than that
    with pytest.raises(APIError) as caught:
        check_budget(params, most + 1, 1, 100)
    num = 2 * (most + 1)
    assert told(caught, param) == (
        f"{param}: {num} continuations × {told_sizes} are {num * size}; there may be at most "
        f"{MAX_PARAMETER_TOKENS}: shorten {param}, lower n, or send fewer prompts"
    )


@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "leave out stream or prompt_logprobs"),
        (
            {"return_hidden_states": True, "stream": True},
            "return_hidden_states",
            "leave out stream or return_hidden_states",
        ),
        (
            {"best_of": 2, "n": 3},
            "best_of",
            "2 continuations cannot give n=3 of them; raise best_of or lower n",
        ),
    ],
)
def test_fields_that_exclude_each_other_are_both_named(fields, param, advice):
    with pytest.raises(APIError) as caught:
        completion_params(CompletionBody(prompt="a", **fields), SamplingParams())
    assert told(caught, param).endswith(advice)


def num_calls(function, *arguments):
    """How many functions of Python are called or resumed, which takes time without giving it to others."""
    count = 0

    def profile(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    return count, result


@pytest.mark.parametrize(
    ("message", "number"),
    [
        ({"content": [{"type": "text", "text": "a"}] * 250}, 96),
        ({"content": [{"type": "text", "text": "a"}] * 250, "annotations": []}, 96),
        ({"content": "a"}, 4000),
        ({"role": "assistant"}, 4000),
    ],
)
def test_messages_are_read_in_a_few_calls_each_however_many_parts_they_have(message, number):
    messages = [{"role": "user", **message}] * number
    data = json.dumps({"messages": messages}).encode()
    count, parsed = num_calls(parse_now, data, ChatBody, None)
    assert count < 30 * number
    text = "\n".join(["a"] * 250) if isinstance(message.get("content"), list) else message.get("content", "")
    assert [each.text for each in parsed.body.messages] == [text] * number
    assert num_calls(lambda: [each.text for each in parsed.body.messages])[0] <= number + 2


@pytest.mark.parametrize("content", [[{"type": "text", "text": 7}], [{"type": "text"}], [{"text": "a"}]])
def test_a_part_that_is_wrong_is_named_among_many(content):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 200 + content}]
    with pytest.raises(APIError) as caught:
        parse_now(json.dumps({"messages": messages}).encode(), ChatBody)
    assert caught.value.param.startswith("messages[0].content[200].")


@pytest.mark.parametrize(
    ("prompt", "advice"),
    [
        (
            [[1] * 8],
            "prompt: 8 tokens; there may be at most 7, so that one of the model's 8 is left to generate",
        ),
        ([[]], "prompt: it has no tokens, and the model needs at least one; write some text"),
        ("a" * 70_000, "prompt: 70000 characters; there may be at most 65536; shorten it"),
    ],
)
def test_a_prompt_of_the_wrong_length_is_told_what_is_allowed(prompt, advice):
    encoder = PromptEncoder(None, max_model_len=8)
    with pytest.raises(APIError) as caught:
        asyncio.run(encoder.encode_completion(CompletionBody(prompt=prompt)))
    assert told(caught, "prompt").startswith(advice)
