"""A request that ends the engine's process does so twice at most, and others are not refused with it."""

from __future__ import annotations

import asyncio

import pytest

from sagellm.core import DeadlyRequestError, Namespace, Runtime, Tenant
from sagellm.core.protocols.engine import RequestLimits
from sagellm.engines import InputProcessor, SamplingParams
from sagellm.engines.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sagellm.engines.requests.queued_request import QueuedRequest
from sagellm.server.remote import suspects
from sagellm.server.remote.suspects import REFUSED_FOR_S, Suspects

LIMITS = RequestLimits(vocab_size=1000, max_model_len=100, num_blocks=100, block_size=16)
_INPUTS = InputProcessor(None, LIMITS, Runtime.virtual())


class Clock:
    now_s = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(clock) -> Suspects:
    return Suspects(lambda: clock.now_s)


def request(token: int, *, tenant: str = "a", salt: str = "", **params) -> QueuedRequest:
    """Return a request with an id of its own, as a client sends it again and again."""
    return _INPUTS.process_request(
        [token], SamplingParams(**params), tenant=Tenant(tenant), namespace=Namespace(tenant, salt)
    )


def output(of: QueuedRequest, *, is_finished: bool = False, error: str | None = None) -> RequestOutput:
    return RequestOutput(
        request_id=of.request_id,
        prompt=None,
        prompt_token_ids=[1],
        outputs=[CompletionOutput(index=0, error=error)],
        metrics=RequestMetrics(arrival_ns=0),
        finished=is_finished,
    )


async def is_waiting(turn: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not turn.done()


def in_loop(use):
    asyncio.run(asyncio.wait_for(use(), 20))


def test_what_was_live_in_two_deaths_is_refused_until_ten_minutes_later(known, clock):
    async def use():
        for _ in range(2):
            await known.wait_for_turn([request(7)])
            known.blame([request(7)])
        with pytest.raises(DeadlyRequestError, match="ended 2 times while it had this request"):
            await known.wait_for_turn([request(8), request(7)])
        clock.now_s = REFUSED_FOR_S - 1
        with pytest.raises(DeadlyRequestError):
            await known.wait_for_turn([request(7)])
        clock.now_s = REFUSED_FOR_S
        await known.wait_for_turn([request(7)])
        assert not known._suspects

    in_loop(use)


@pytest.mark.parametrize(
    "other",
    [{"tenant": "b"}, {"salt": "s"}, {"temperature": 0.5}, {"max_tokens": 3}, {"token": 8}],
    ids=lambda other: next(iter(other)),
)
def test_a_request_that_differs_is_another(known, other):
    async def use():
        for _ in range(2):
            known.blame([request(7)])
        await known.wait_for_turn([request(**({"token": 7} | other))])

    in_loop(use)


def test_suspects_begin_one_after_the_other_and_what_is_new_beside_them(known):
    async def use():
        first, second = request(1), request(2)
        known.blame([first, second])
        await known.wait_for_turn([first])
        turn = asyncio.create_task(known.wait_for_turn([second]))
        assert await is_waiting(turn)
        await known.wait_for_turn([request(3)])
        known.take([output(first)])
        await turn

    in_loop(use)


def test_a_turn_that_a_death_has_ended_is_over_and_the_next_is_waited_for(known):
    async def use():
        first, second = request(1), request(2)
        known.blame([first, second])
        turn = await known.wait_for_turn([first])
        known.end_turns()
        assert turn != known.num_ends
        await known.wait_for_turn([second])
        waiting = asyncio.create_task(known.wait_for_turn([first]))
        assert await is_waiting(waiting)
        known.end_turns()
        assert await waiting == known.num_ends

    in_loop(use)


@pytest.mark.parametrize("way", ["its client leaves", "it fails", "the core dies"])
def test_a_turn_ends_with_its_request(known, way):
    async def use():
        first, second = request(1), request(2)
        known.blame([first, second])
        await known.wait_for_turn([first])
        turn = asyncio.create_task(known.wait_for_turn([second]))
        assert await is_waiting(turn)
        if way == "its client leaves":
            known.leave(first.request_id)
        elif way == "it fails":
            known.take([output(first, is_finished=True, error="no")])
        else:
            known.blame([first])
        await turn

    in_loop(use)


def test_a_turn_lasts_until_each_prompt_of_its_job_has_a_token(known):
    async def use():
        job, other = [request(1), request(2)], request(3)
        known.blame([*job, other])
        await known.wait_for_turn(job)
        turn = asyncio.create_task(known.wait_for_turn([other]))
        known.take([output(job[0])])
        assert await is_waiting(turn)
        known.take([output(job[1])])
        await turn

    in_loop(use)


def test_a_death_in_a_turn_is_not_blamed_on_suspects_that_had_theirs(known):
    async def use():
        innocent, deadly = request(1), request(2)
        known.blame([innocent, deadly])
        await known.wait_for_turn([innocent])
        known.take([output(innocent)])
        await known.wait_for_turn([deadly])
        fresh = request(3)
        known.blame([innocent, deadly, fresh])
        await known.wait_for_turn([request(1)])
        with pytest.raises(DeadlyRequestError):
            await known.wait_for_turn([request(2)])
        known.blame([request(1)])
        with pytest.raises(DeadlyRequestError):
            await known.wait_for_turn([request(1)])
        assert {each.num_deaths for each in known._suspects.values()} == {1, 2}

    in_loop(use)


def test_an_answered_suspect_is_cleared(known):
    async def use():
        known.blame([request(1)])
        again = request(1)
        await known.wait_for_turn([again])
        known.take([output(again, is_finished=True)])
        known.blame([request(1)])
        await known.wait_for_turn([request(1)])

    in_loop(use)


def test_memory_is_bounded_and_holds_no_request(known, monkeypatch):
    monkeypatch.setattr(suspects, "_MAX_SUSPECTS", 3)
    known.blame([request(each) for each in range(1, 8)])
    assert len(known._suspects) == 3
    assert {len(mark) for mark in known._suspects} == {16}
    other = Suspects(lambda: 0.0)
    other.blame([request(7)])
    assert not known._suspects.keys() & other._suspects.keys(), "the key is another in each process"
