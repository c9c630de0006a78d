"""Answers with many log-probabilities are written in parts, between which others have their turn."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from sagellm.core.protocols.engine import PromptScores
from sagellm.engines import SamplingParams
from sagellm.engines.logprobs import Logprobs, Position, PromptLogprobs
from sagellm.engines.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sagellm.engines.testing.decoders import byte_ids, llama_style
from sagellm.engines.text.detokenizer import Decoders, TokenText, decoder_of
from sagellm.server.http import generation
from sagellm.server.http.chat_shape import ChatShape
from sagellm.server.http.completion_shape import CompletionShape
from sagellm.server.http.job_streams import ClientGoneError
from sagellm.server.http.prompt_encoder import EncodedPrompt
from sagellm.server.http.reply import JSONReply
from sagellm.server.http.shape import Job

NUM_TOP, NUM_TOKENS, NUM_PROMPTS = 20, 400, 3
LONG = {"prompt": [[5, 6, 7, 8] * 10] * 40, "max_tokens": 1, "prompt_logprobs": 5}


def requests(ids):
    """Requests with as many scored tokens in prompt and output."""
    decoders = Decoders(llama_style())
    num_scored = len(ids) - 1
    scores = PromptScores(
        NUM_TOP, bytes(4 * num_scored), bytes(8 * num_scored * (1 + NUM_TOP)), bytes(4 * num_scored * NUM_TOP)
    )
    logprobs = Logprobs()
    for _ in ids:
        texts = [TokenText("a", b"a")] * (1 + NUM_TOP)
        logprobs.append(Position(range(1 + NUM_TOP), [-1.0] * (1 + NUM_TOP), 1, texts))
    return [
        RequestOutput(
            request_id=str(index),
            prompt=None,
            prompt_token_ids=ids,
            outputs=[
                CompletionOutput(
                    index=0, text="a", token_ids=list(ids), finish_reason="length", logprobs=logprobs
                )
            ],
            metrics=RequestMetrics(arrival_ns=0),
            finished=True,
            prompt_logprobs=PromptLogprobs(ids, scores, decoders),
        )
        for index in range(NUM_PROMPTS)
    ]


def shape_of(kind, ids):
    params = SamplingParams(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    prompts = [EncodedPrompt(token_ids=ids, text="a" * len(ids))] * NUM_PROMPTS
    job = Job(prompts=prompts, params=params, model="m", is_streamed=False, num_choices=1, echoes=True)
    return kind(job)


class Run:
    """A run whose outputs are there; its client leaves after so many looks for it."""

    def __init__(self, outputs, num_looks=10**9):
        self._outputs, self.num_looks = outputs, num_looks

    async def outputs(self):
        for entry in enumerate(self._outputs):
            yield entry

    def raise_if_stopped(self):
        self.num_looks -= 1
        if self.num_looks < 0:
            raise ClientGoneError


def write(shape, run):
    """Write an answer; return its messages, and how often something else had a turn."""
    messages, turns = [], 0

    async def send(message):
        messages.append(message)

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main():
        task = asyncio.create_task(others())
        await asyncio.sleep(0)
        try:
            reply = JSONReply(send)
            await generation._write(run, shape, reply)
            await reply.finish()
        finally:
            task.cancel()

    asyncio.run(main())
    return messages, turns


@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
@pytest.mark.parametrize("text", ["a", "船"])  # text is known at once, or when a run of bytes ends
def test_each_part_of_an_answer_costs_little(monkeypatch, kind, text):
    tokenizer = llama_style()
    num_decoded, real = [0], decoder_of(tokenizer, skip_special_tokens=True).__class__.decode

    def decode(self, token_ids):
        num_decoded[0] += len(token_ids)
        return real(self, token_ids)

    monkeypatch.setattr("sagellm.engines.text.detokenizer._BackendDecoder.decode", decode)
    ids = [tokenizer.token_to_id("a")] if text == "a" else byte_ids(tokenizer, text.encode())
    ids = (ids * NUM_TOKENS)[:NUM_TOKENS]
    costs = []
    for part in shape_of(kind, ids).parts(requests(ids)):
        costs.append((num_decoded[0], len(part)))
        num_decoded[0] = 0
    assert len(costs) > 2 * NUM_TOKENS
    assert max(size for _, size in costs) <= 64 << 10
    # The end of a run decodes all of it once.
    most = 4 * (NUM_TOP + 2)
    assert sum(decoded > most for decoded, _ in costs) <= 2 * NUM_PROMPTS
    assert max(decoded for decoded, _ in costs) <= most + 2 * NUM_TOKENS


def test_others_have_a_turn_after_each_slice():
    ids = [5] * NUM_TOKENS
    shape, outputs = shape_of(CompletionShape, ids), requests(ids)
    num_parts = sum(1 for _ in shape.parts(outputs))
    messages, turns = write(shape, Run(outputs))
    assert num_parts // 64 <= turns <= num_parts // 64 + 2
    start, *bodies = messages
    assert b"content-length" not in dict(start["headers"])
    assert all(len(body["body"]) <= 128 << 10 for body in bodies)
    assert [body.get("more_body", False) for body in bodies] == [True] * (len(bodies) - 1) + [False]
    answer = json.loads(b"".join(body["body"] for body in bodies))
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [2 * NUM_TOKENS] * 3


def test_nothing_more_is_written_for_a_client_that_is_gone():
    shape = shape_of(CompletionShape, [5] * NUM_TOKENS)
    run = Run(requests([5] * NUM_TOKENS), num_looks=3)
    with pytest.raises(ClientGoneError):
        write(shape, run)
    assert run.num_looks == -1


def test_a_long_answer_comes_in_chunks_and_a_short_one_whole(server, complete):
    answer = server.http.post("/v1/completions", json=LONG)
    assert answer.headers["transfer-encoding"] == "chunked"
    short = server.http.post("/v1/completions", json=LONG | {"prompt": LONG["prompt"][:1]})
    assert int(short.headers["content-length"]) == len(short.content)
    (few,) = short.json()["choices"]
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(40))
    for each in choices:
        assert each["text"] == few["text"]
        for found, expected in zip(each["prompt_logprobs"][1:], few["prompt_logprobs"][1:], strict=True):
            assert found.keys() == expected.keys()
            for token, one in found.items():  # products differ in their last bits with the size of a batch
                assert one["logprob"] == pytest.approx(expected[token]["logprob"], abs=1e-4)
                assert one["decoded_token"] == expected[token]["decoded_token"]


@pytest.mark.parametrize("number", [0, 700])
def test_a_failure_amid_an_answer_leaves_it_incomplete(server, complete, monkeypatch, number):
    real, left = PromptLogprobs.positions, iter(range(10**6))

    def positions(self, **options):
        for position in real(self, **options):
            if next(left) == 2 * number:
                raise KeyError("secret")
            yield position

    monkeypatch.setattr(PromptLogprobs, "positions", positions)
    if number:
        with pytest.raises(httpx.RemoteProtocolError):
            server.http.post("/v1/completions", json=LONG)
    else:
        answer = server.http.post("/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in answer.text
    monkeypatch.undo()
    assert complete(max_tokens=1)["usage"]["completion_tokens"] == 1
