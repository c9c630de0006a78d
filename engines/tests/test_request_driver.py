"""A refused request leaves nothing, an id is used once, and a step aborts only what has to end."""

from __future__ import annotations

import asyncio

import pytest

from sagellm.core import DuplicateRequestError, UnknownRequestError
from sagellm.engines import AsyncLLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_a_request_whose_third_sequence_is_refused_leaves_nothing(
    make_engine, monkeypatch, all_blocks_are_back
):
    engine, num_added = make_engine(), 0
    core = engine.client.core
    real = core.add

    def refuse_the_third(sequence):
        nonlocal num_added
        num_added += 1
        if num_added == 3:
            raise RuntimeError("no more")
        real(sequence)

    with monkeypatch.context() as patched:
        patched.setattr(core, "add", refuse_the_third)
        with pytest.raises(RuntimeError, match="no more"):
            engine.add_request([5, 6, 7], SamplingParams(n=4, max_tokens=9), request_id="a")
    assert not engine.has_unfinished_requests()
    with pytest.raises(UnknownRequestError):
        engine.abort_request("a")
    engine.add_request([5, 6, 7], GREEDY, request_id="a")
    while engine.has_unfinished_requests():
        engine.step()
    assert all_blocks_are_back(engine)


def test_an_id_that_is_in_use_is_refused_alike(make_engine):
    async def use():
        async with AsyncLLMEngine(engine) as front:
            stream = await front.add_request([5, 6, 7], GREEDY, request_id="b")
            with pytest.raises(DuplicateRequestError, match="request id 'b' is in use"):
                await front.add_request([5, 6, 7], GREEDY, request_id="b")
            return [output async for output in stream][-1].finished

    engine = make_engine()
    engine.add_request([5, 6, 7], GREEDY, request_id="a")
    with pytest.raises(DuplicateRequestError, match="request id 'a' is in use"):
        engine.add_request([5, 6, 7], GREEDY, request_id="a")
    engine.abort_request("a")
    assert asyncio.run(use())


def test_a_step_that_ends_nothing_aborts_nothing(make_engine, monkeypatch):
    engine = make_engine()
    core = engine.client.core
    real, aborted = core.abort, []

    def abort(sequence_ids, **options):
        aborted.append((list(sequence_ids), options))
        real(sequence_ids, **options)

    monkeypatch.setattr(core, "abort", abort)
    engine.generate([5, 6, 7], GREEDY)
    assert aborted == []
    text = engine.generate("The river", GREEDY)[0].outputs[0].text
    output = engine.generate("The river", SamplingParams(temperature=0.0, max_tokens=6, stop=text[1:3]))[0]
    assert output.outputs[0].finish_reason == "stop"
    assert aborted == [([f"{output.request_id}#0"], {"finish_reason": "stop"})]
