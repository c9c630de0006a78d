"""Ctrl-C, as the signal that it is: it waits for the end of a step, and nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sagellm.engines import AsyncLLMEngine, LLMEngine, SamplingParams
from sagellm.engines.held_interrupts import HeldInterrupts

PROMPTS = [[5, 6, 7] * 9, [8, 9] * 7, [5, 6, 7] * 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TIGHT = {"num_blocks": 24, "block_size": 4}
PLACES = {
    "plan": "client.core.scheduler.schedule",
    "submit": "client.core.parts.executor.submit",
    "collect": "client.core.parts.executor.collect",
    "observe": "client.core.kv.tell_events",
    "text": "driver._output.process",
}


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def the_handler_is_back():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture(scope="module")
def expected(make_engine) -> list[list[int]]:
    with make_engine(**TIGHT) as engine:
        return tokens_of(engine)


def tokens_of(engine: LLMEngine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def interrupt(monkeypatch, engine: LLMEngine, place: str, *, at: int, times: int = 1) -> None:
    """Have Ctrl-C pressed before a call, the one of this number, from 1."""
    *path, name = place.split(".")
    owner = engine
    for each in path:
        owner = getattr(owner, each)
    call, num_calls = getattr(owner, name), 0

    def pressed(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls != at:
            return call(*args, **kwargs)
        for _ in range(times):
            ctrl_c()
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, pressed)


def pressed_at_call(number: int, function: Callable[[], Any]) -> Any:
    """Call a function, and press Ctrl-C when it has called this many Python functions."""
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call"
        if num_calls == number:
            sys.setprofile(None)
            ctrl_c()

    sys.setprofile(count)
    try:
        return function()
    finally:
        sys.setprofile(None)


def run_through(engine: LLMEngine, *, at_step: int = 0, at_call: int = 0) -> tuple[list[list[int]], int]:
    """Step to the end in spite of Ctrl-C; return the tokens of each prompt, and how often it came.

    `at_step` and `at_call` say in which step, and at which call of a function in it, to press it.
    """
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    finished, num_interrupts, num_steps = {}, 0, 0
    while engine.has_unfinished_requests():
        num_steps += 1
        try:
            outputs = pressed_at_call(at_call, engine.step) if num_steps == at_step else engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        finished |= {output.request_id: output for output in outputs if output.finished}
    return [finished[each].outputs[0].token_ids for each in ids], num_interrupts


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_within_a_step_is_raised_at_its_end_and_loses_nothing(
    make_engine, all_blocks_are_back, monkeypatch, expected, place, at
):
    with make_engine(**TIGHT) as engine:
        interrupt(monkeypatch, engine, PLACES[place], at=at)
        assert run_through(engine) == (expected, 1)
        assert all_blocks_are_back(engine)


@pytest.mark.parametrize("which", [1, 2, 4])
def test_ctrl_c_at_any_call_of_a_step_loses_nothing(make_engine, all_blocks_are_back, expected, which):
    num_interrupts = 0
    with make_engine(**TIGHT) as engine:
        for number in range(1, 1600, 31):
            engine.reset_prefix_cache()
            tokens, num = run_through(engine, at_step=which, at_call=number)
            num_interrupts += num
            assert tokens == expected
            assert all_blocks_are_back(engine)
    assert num_interrupts > 9  # the steps are of different lengths


def test_the_outputs_of_the_last_step_come_after_ctrl_c(make_engine, monkeypatch):
    with make_engine() as engine:
        engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1))
        interrupt(monkeypatch, engine, PLACES["observe"], at=1)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.has_unfinished_requests()
        [output] = engine.step()
        assert output.finished
        assert not engine.has_unfinished_requests()
        assert engine.step() == []


@pytest.mark.parametrize(("max_tokens", "reason"), [(1, "length"), (5, "abort")])
def test_an_abort_after_ctrl_c_gives_the_last_output_and_leaves_none(
    make_engine, monkeypatch, max_tokens, reason
):
    with make_engine() as engine:
        request_id = engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=max_tokens))
        interrupt(monkeypatch, engine, PLACES["observe"], at=1)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        output = engine.abort_with_output(request_id)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, reason)
        assert not engine.has_unfinished_requests()
        assert engine.step() == []


@pytest.mark.parametrize("place", PLACES)
def test_generate_ends_its_requests_on_ctrl_c_and_others_go_on(
    make_engine, all_blocks_are_back, monkeypatch, expected, place
):
    with make_engine(**TIGHT) as engine:
        other = engine.add_request([3, 4], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        interrupt(monkeypatch, engine, PLACES[place], at=2)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY)
        assert [request.request_id for request in engine.driver.live_requests] == [other]
        while engine.has_unfinished_requests():
            last = engine.step()
        assert len(last[0].outputs[0].token_ids) == 9
        assert all_blocks_are_back(engine)
        assert tokens_of(engine) == expected


def test_a_request_is_not_queued_if_ctrl_c_comes_meanwhile(make_engine, all_blocks_are_back, monkeypatch):
    with make_engine(**TIGHT) as engine:
        interrupt(monkeypatch, engine, "client.add", at=1)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request([5, 6, 7], GREEDY, request_id="mine")
        assert not engine.has_unfinished_requests()
        assert all_blocks_are_back(engine)
        assert engine.add_request([5, 6, 7], GREEDY, request_id="mine") == "mine"


def test_an_abort_is_completed_before_ctrl_c_is_raised(make_engine, all_blocks_are_back, monkeypatch):
    with make_engine(**TIGHT) as engine:
        request_id = engine.add_request([5, 6, 7], GREEDY)
        engine.step()
        interrupt(monkeypatch, engine, "client.abort", at=1)
        with pytest.raises(KeyboardInterrupt):
            engine.abort_request(request_id)
        assert request_id not in engine.driver
        assert all_blocks_are_back(engine)


def test_an_engine_is_closed_before_ctrl_c_is_raised(make_engine, monkeypatch):
    engine = make_engine()
    interrupt(monkeypatch, engine, "client.core.kv.close", at=1)
    closed = []
    monkeypatch.setattr(engine.client.core.parts.executor, "close", lambda: closed.append(1))
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert closed


@pytest.mark.parametrize("place", PLACES)
def test_a_second_ctrl_c_is_raised_at_once_and_ends_what_runs(
    make_engine, all_blocks_are_back, monkeypatch, expected, place
):
    with make_engine(**TIGHT) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, GREEDY)
        interrupt(monkeypatch, engine, PLACES[place], at=2, times=2)
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert not engine.driver.live_requests
        assert not engine.has_unfinished_requests()
        assert all_blocks_are_back(engine)
        assert tokens_of(engine) == expected


def test_a_second_ctrl_c_gets_out_of_a_block_that_hangs():
    reached = []

    def hang() -> None:
        with HeldInterrupts():
            for which in ("first", "second"):
                ctrl_c()
                reached.append(which)

    with pytest.raises(KeyboardInterrupt):
        hang()
    assert reached == ["first"]


def test_ctrl_c_that_came_before_an_error_is_raised_with_it():
    def fail() -> None:
        with HeldInterrupts():
            ctrl_c()
            raise OSError("gone")

    with pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert isinstance(raised.value.__context__, OSError)


def test_the_outermost_block_raises_and_one_that_takes_it_does_not():
    with HeldInterrupts() as held:
        with HeldInterrupts():
            ctrl_c()
        assert held.is_pending
        assert held.take()
        assert not held.take()


def test_the_handler_of_somebody_else_stays(make_engine):
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with HeldInterrupts() as held:
            ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [1]
    assert not held.is_pending


def test_a_handler_that_the_block_sets_stays():
    pressed = []
    before = signal.getsignal(signal.SIGINT)
    try:
        with HeldInterrupts():
            signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
        ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [1]


def test_another_thread_holds_nothing():
    found = []

    def hold() -> None:
        with HeldInterrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_ctrl_c_cancels_what_waits_for_an_engine_of_asyncio(make_engine, all_blocks_are_back, expected):
    seen = []

    async def converse(engine: AsyncLLMEngine) -> None:
        async with engine:
            async for output in engine.generate([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True)):
                seen.append(output)
                if len(seen) == 2:
                    ctrl_c()

    with make_engine(**TIGHT | {"num_blocks": 64}) as engine:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(converse(AsyncLLMEngine(engine)))
        assert len(seen) == 2
        assert not engine.has_unfinished_requests()
        assert all_blocks_are_back(engine)
        assert tokens_of(engine) == expected
