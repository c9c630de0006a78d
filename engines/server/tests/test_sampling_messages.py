"""What requests ask of sampling, and what they get, goes over the socket and comes back equal."""

from __future__ import annotations

import msgspec
import pytest

from sagellm.core import EngineError, ExtraArg, Namespace, Runtime, SequenceId
from sagellm.core.protocols.engine import PromptScores
from sagellm.engines import InputProcessor, SampledToken, SamplingParams
from sagellm.engines.engine_core import TokenOutput
from sagellm.engines.requests.input_processor import RequestLimits
from sagellm.engines.requests.request_checks import check_request, check_shared
from sagellm.engines.testing import make_tokenizer
from sagellm.server.remote.frames import FrameReader, encode
from sagellm.server.remote.messages import Add, Hello, Step

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
    [arrived] = FrameReader(kind).feed(encode(message))
    return arrived


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {3: 1.5, 1023: -100}, "extra_args": {"rule": [1, 2], "style": "a"}},
        {"allowed_token_ids": [5, 6], "min_tokens": 2, "stop_token_ids": [7]},
        {"bad_words": ["the", "lighthouse"], "bad_words_token_ids": [[1, 2]]},
        {"prompt_logprobs": 3, "n": 3, "seed": -1},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"choice": ["a", "b"]}},
    ],
)
def test_a_request_arrives_as_it_was(options):
    processor = InputProcessor(make_tokenizer(), LIMITS, Runtime.virtual())
    request = processor.process_request(
        [5, 6, 7], SamplingParams(**options), namespace=Namespace("t", "s"), priority=-3
    )
    job = over_the_wire(Add.of([request]), Add)
    check_shared(job.params, job.stop_token_ids, LIMITS)
    [arrived] = job.requests()
    check_request(arrived, LIMITS)
    assert arrived == request
    assert arrived.sequences == request.sequences
    assert arrived.request.token_ids.data == request.request.token_ids.data


def test_one_continuation_scores_the_prompt_for_all():
    params = SamplingParams(n=3, prompt_logprobs=1, seed=2**63 - 1)
    sequences = InputProcessor(None, LIMITS, Runtime.virtual()).process_request([5, 6], params).sequences
    assert [each.params.prompt_logprobs for each in sequences] == [1, None, None]
    assert [each.seed for each in sequences] == [2**63 - 1, 0, 1]
    assert len({each.sequence_id for each in sequences}) == 3


def test_what_logits_processors_read_arrives_as_it_was():
    """The front checks it, and has no processors."""
    hello = Hello({}, LIMITS, SamplingParams(), 1)
    assert over_the_wire(hello, Hello).limits == LIMITS


def test_scores_of_a_prompt_arrive_as_they_were():
    scores = [SampledToken(5, -1.5, [(6, -0.5), (5, -1.5)], 2), SampledToken(6, -2.0, [], 9)]
    of_prompt = PromptScores(1, bytes(8), bytes(32), bytes(range(8)))
    output = TokenOutput(SequenceId("a#0"), [5, 6], logprobs=scores, prompt_scores=of_prompt)
    assert over_the_wire(Step([output]), Step).outputs == [output]


def test_scores_whose_columns_differ_are_refused():
    scores = {"num_top": 1, "ranks": bytes(4), "values": bytes(16), "top_ids": bytes(8)}
    message = msgspec.msgpack.encode(["step", [{"sequence_id": "a#0", "prompt_scores": scores}]])
    with pytest.raises(EngineError, match="not those of the same tokens with 1 others each"):
        list(FrameReader(Step).feed(len(message).to_bytes(4, "little") + message))
