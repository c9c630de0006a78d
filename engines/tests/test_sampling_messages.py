"""What requests ask of sampling, and what they get, goes over the socket and comes back equal."""

from __future__ import annotations

import msgspec
import pytest

from sagellm.core import ExtraArg, Runtime, SequenceId
from sagellm.engines import InputProcessor, SampledToken, SamplingParams
from sagellm.engines.core import TokenOutput
from sagellm.engines.input_processor import RequestLimits
from sagellm.engines.serving.conversion import make_requests, make_sequences
from sagellm.engines.serving.messages import Hello, NewRequest
from sagellm.engines.testing import make_tokenizer

LIMITS = RequestLimits(
    vocab_size=1024,
    max_model_len=64,
    max_model_len_reason="the test",
    num_blocks=8,
    block_size=4,
    eos_token_ids=frozenset({2}),
    extra_args=(
        ExtraArg(name="rule", type="int", is_list=True, maximum=9),
        ExtraArg(name="style", type="str", summary="how"),
    ),
)


def over_the_wire(message, kind):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {3: 1.5, 1023: -100}, "extra_args": {"rule": [1, 2], "style": "a"}},
        {"allowed_token_ids": [5, 6], "min_tokens": 2, "stop_token_ids": [7]},
        {"bad_words": ["the", "lighthouse"], "bad_words_token_ids": [[1, 2]]},
        {"prompt_logprobs": 3},
    ],
)
def test_parameters_arrive_as_they_were(options):
    processor = InputProcessor(make_tokenizer(), LIMITS, Runtime.virtual())
    [sequence] = processor.process_request([5, 6, 7], SamplingParams(**options)).sequences
    [message] = make_requests([sequence])
    [arrived] = make_sequences(over_the_wire(message, NewRequest), LIMITS)
    assert arrived.params == sequence.params
    assert (arrived.num_to_score, arrived.stop_token_ids) == (sequence.num_to_score, sequence.stop_token_ids)


def test_what_logits_processors_read_arrives_as_it_was():
    """The front checks it, and has no processors."""
    hello = Hello({}, LIMITS, SamplingParams(), 1)
    assert over_the_wire(hello, Hello).limits == LIMITS


def test_scores_of_a_prompt_arrive_as_they_were():
    scores = [SampledToken(5, -1.5, [(6, -0.5), (5, -1.5)], 2), SampledToken(6, -2.0, [], 9)]
    output = TokenOutput(SequenceId("a#0"), SampledToken(7), prompt_scores=scores)
    assert over_the_wire(output, TokenOutput) == output
