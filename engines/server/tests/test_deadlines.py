"""Deadlines in the engine: late requests end within a step, running or waiting, alone or with others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sagellm.core import InvalidRequestError, Runtime, Tenant, VirtualClock
from sagellm.engines import AsyncLLMEngine, SamplingParams
from sagellm.engines.requests.request_checks import check_request
from sagellm.server.remote.frames import FrameReader, encode
from sagellm.server.remote.messages import Add, ToCore

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def engine(make_engine, clock):
    system = Runtime.system(seed=0)
    return make_engine(
        max_num_seqs=2, runtime=Runtime(clock=clock, randomness=system.randomness, files=system.files)
    )


def finished(engine):
    """Run to the end; return each request's last output."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def test_a_running_request_ends_within_a_step_of_its_deadline(engine, clock):
    engine.add_request([5, 6, 7], GREEDY, request_id="late", deadline_ms=100)
    engine.add_request([5, 6, 8], GREEDY, request_id="free")
    for _ in range(5):
        engine.step()
    clock.advance_ns(100_000_000)
    engine.step()
    assert engine.has_unfinished_requests()
    clock.advance_ns(1_000)
    [late] = [output for output in engine.step() if output.request_id == "late"]
    [output] = late.outputs
    assert (late.finished, output.finish_reason) == (True, "deadline")
    assert output.error == "the deadline, 100 ms, has passed"
    assert len(output.token_ids) == 6, "what was generated is kept"
    assert len(finished(engine)["free"].outputs[0].token_ids) == 40


def test_waiting_requests_end_too(engine, clock):
    for name in ("a", "b", "c"):
        engine.add_request([5, 6, 7], GREEDY, request_id=name, deadline_ms=50 if name == "c" else None)
    engine.step()
    assert (engine.metrics().num_running, engine.metrics().num_waiting) == (2, 1)
    clock.advance_ns(50_000_001)
    [late] = [output for output in engine.step() if output.request_id == "c"]
    assert late.outputs[0].finish_reason == "deadline"
    assert engine.metrics().num_waiting == 0


def test_each_continuation_ends(engine, clock):
    params = SamplingParams(n=4, max_tokens=40, ignore_eos=True)
    engine.add_request([5, 6, 7], params, deadline_ms=50)
    engine.step()
    clock.advance_ns(10**9)
    [output] = engine.step()
    assert output.finished
    assert [each.finish_reason for each in output.outputs] == ["deadline"] * 4
    assert not engine.has_unfinished_requests()


def test_deadlines_pass_in_any_order_of_arrival(engine, clock):
    deadlines = [300, 100, None, 200, 100]
    for deadline_ms in deadlines:
        engine.add_request(
            [5, 6, 7], GREEDY, request_id=str(engine.metrics().num_waiting), deadline_ms=deadline_ms
        )
    ended = []
    for _ in range(4):
        ended.append({o.request_id for o in engine.step() if o.outputs[0].finish_reason == "deadline"})
        clock.advance_ns(100_000_001)
    assert ended == [set(), {"1", "4"}, {"3"}, {"0"}]
    assert set(finished(engine)) == {"2"}


def test_an_abort_after_the_deadline_is_told_as_late(engine, clock):
    for name, deadline_ms in (("late", 100), ("early", 300), ("any", None)):
        engine.add_request([5, 6, 7], GREEDY, request_id=name, deadline_ms=deadline_ms)
    clock.advance_ns(200 * 10**6)
    core = engine.client.core
    for name in ("late", "early", "any"):
        engine.abort_request(name)
    ended = {story.facts.request_id: story.events[-1].reason for story in core.scheduler.log.stories()}
    assert ended == {"late": "deadline", "early": "abort", "any": "abort"}


def test_one_that_ends_in_time_is_not_late(engine, clock):
    engine.add_request([5, 6, 7], GREEDY, request_id="first", deadline_ms=100)
    assert finished(engine)["first"].outputs[0].finish_reason == "length"
    clock.advance_ns(10**9)
    engine.add_request([5, 6, 7], GREEDY, request_id="second")
    assert finished(engine)["second"].outputs[0].finish_reason == "length"


def test_blocks_come_back(engine, clock):
    for _ in range(6):
        engine.add_request(list(range(5, 45)), GREEDY, deadline_ms=10)
    engine.step()
    clock.advance_ns(10**9)
    finished(engine)
    engine.client.core.kv.check_integrity()
    metrics = engine.metrics().modules
    assert metrics["prefix_cache"].num_locked_blocks == 0


@pytest.mark.parametrize("deadline_ms", [0, -1, float("nan"), float("inf"), True, "5", 86_400_001])
def test_a_deadline_that_is_none_is_refused(engine, deadline_ms):
    with pytest.raises(InvalidRequestError, match="deadline_ms"):
        engine.add_request([5], GREEDY, deadline_ms=deadline_ms)


@pytest.mark.parametrize(
    "tenant", ["red", None, Tenant("red", weight=0), Tenant("red", float("nan")), Tenant("")]
)
def test_a_tenant_that_cannot_be_charged_is_refused(engine, tenant):
    with pytest.raises(InvalidRequestError, match="tenant"):
        engine.add_request([5], GREEDY, tenant=tenant)


def test_an_unknown_option_is_a_mistake_of_the_program(engine):
    with pytest.raises(TypeError, match="a request has no 'prio'"):
        engine.add_request([5], GREEDY, prio=5)


def test_tenant_and_deadline_cross_the_socket(engine):
    tenant = Tenant("red", 2.5, is_trusted=True)
    request = engine.driver.input.process_request([5, 6], GREEDY, tenant=tenant, deadline_ms=1500)
    reader = FrameReader(ToCore)
    reader.add(encode(Add.of([request])))
    (received,) = reader.next().requests()
    assert received == request
    assert received.request.tenant.code == tenant.code
    check_request(received, engine.driver.input.limits)
    assert received.request.deadline_ns - received.request.arrival_ns == 1_500_000_000


@pytest.mark.parametrize(
    "changed",
    [
        {"tenant": Tenant("red", weight=0.0)},
        {"tenant": Tenant("red", weight=float("nan"))},
        {"tenant": Tenant("red", weight=-1.0)},
        {"tenant": Tenant("x" * 2000)},
        {"deadline_ns": -5},
        {"deadline_ns": 1 << 62},
    ],
)
def test_the_core_refuses_what_no_front_sends(engine, changed):
    request = engine.driver.input.process_request([5, 6], GREEDY)
    hostile = replace(request, request=replace(request.request, **changed))
    reader = FrameReader(ToCore)
    reader.add(encode(Add.of([hostile])))
    (received,) = reader.next().requests()
    with pytest.raises(InvalidRequestError):
        check_request(received, engine.driver.input.limits)


def test_a_consumer_sees_the_reason(engine, clock):
    async def use():
        async with AsyncLLMEngine(engine) as front:
            outputs = []
            async for output in front.generate([5, 6, 7], GREEDY, deadline_ms=50):
                outputs.append(output)
                clock.advance_ns(20_000_000)
            return outputs[-1]

    last = asyncio.run(use())
    assert (last.finished, last.outputs[0].finish_reason) == (True, "deadline")
