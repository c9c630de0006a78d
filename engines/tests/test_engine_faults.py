"""A module, an observer or the tokenizer fails in the middle of a step: every request gets an answer, no
block is lost, and the engine goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from sagellm.core import PluginRegistry, ScheduleIR, SchedulerPassProtocol, hookimpl
from sagellm.engines import SamplingParams
from sagellm.engines.text.detokenizer import IncrementalDetokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 6, [9, 10] * 12, list(range(20, 40))]
TIGHT = {"num_blocks": 24, "block_size": 4}


class Broken(Exception):
    pass


def break_call(monkeypatch, owner, name: str, *, number: int) -> None:
    """Have one call raise, the others do what they did."""
    call, count = getattr(owner, name), 0

    def counted(*args, **options):
        nonlocal count
        count += 1
        if count == number:
            raise Broken(name)
        return call(*args, **options)

    monkeypatch.setattr(owner, name, counted)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(make_engine) -> list[list[int]]:
    return tokens_of(make_engine(enable_prefix_caching=False).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ir", "schedule"),
        ("cache", "match_prefix"),
        ("cache", "lock"),
        ("cache", "insert_prefix"),
        ("cache", "evict"),
        ("pool", "allocate"),
        ("pool", "evict_if_needed"),
    ],
)
def test_a_broken_module_loses_no_block_and_no_request(
    make_engine, all_blocks_are_back, expected, monkeypatch, module, name, number
):
    engine = make_engine(**TIGHT)
    core = engine.client.core
    owner = {"ir": core.scheduler._ir, "cache": core.kv.cache, "pool": core.kv._pool}[module]
    with monkeypatch.context() as broken:
        break_call(broken, owner, name, number=number)
        outputs = engine.generate(PROMPTS, GREEDY)
    for output, tokens in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        assert output.finished
        if completion.finish_reason == "error":
            assert completion.error == f"Broken: {name}"
            assert completion.token_ids == tokens[: len(completion.token_ids)]
        else:
            assert completion.token_ids == tokens
    assert not engine.has_unfinished_requests()
    assert all_blocks_are_back(engine)
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("num_blocks", [12, 16, 24])
def test_requests_run_though_the_eviction_policy_keeps_every_block(make_engine, expected, num_blocks):
    engine = make_engine(num_blocks=num_blocks, block_size=4, eviction_policy="null")
    for _ in range(3):
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
        engine.client.core.kv.check_integrity()


@pytest.mark.parametrize("hook", ["request_finished", "step_finished", "kv_events"])
def test_a_broken_observer_changes_nothing(make_engine, all_blocks_are_back, expected, hook):
    calls = []

    class Observer:
        @hookimpl
        def sagellm_request_finished(self, record):
            self.see("request_finished")

        @hookimpl
        def sagellm_step_finished(self, record):
            self.see("step_finished")

        @hookimpl
        def sagellm_kv_events(self, events):
            self.see("kv_events")

        def see(self, name):
            if name == hook:
                calls.append(name)
                raise Broken(name)

    registry = PluginRegistry.load()
    registry.register(Observer(), distribution="observer")
    engine = make_engine(registry=registry)
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
    assert calls
    assert all_blocks_are_back(engine)


@pytest.mark.parametrize("name", ["predict", "update"])
def test_a_broken_predictor_changes_nothing(make_engine, all_blocks_are_back, expected, monkeypatch, name):
    engine = make_engine()
    break_call(monkeypatch, engine.client.core.parts.predictor, name, number=1)
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
    assert all_blocks_are_back(engine)


def test_a_token_that_cannot_become_text_ends_its_request_alone(
    make_engine, all_blocks_are_back, expected, monkeypatch
):
    engine = make_engine()
    break_call(monkeypatch, IncrementalDetokenizer, "append", number=5)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].error == "Broken: append"
    assert tokens_of(outputs)[::2] == expected[::2]
    assert all_blocks_are_back(engine)


def test_nothing_is_cached_of_a_request_that_failed(make_engine, all_blocks_are_back, monkeypatch):
    engine = make_engine(block_size=4, max_num_batched_tokens=8)
    prompt = list(range(20, 60))
    with monkeypatch.context() as broken:  # NaN shows in the logits alone, long after it is in the KV
        forward = engine.client.core.runner.execute_model
        broken.setattr(
            engine.client.core.runner, "execute_model", lambda batch: forward(batch) * float("nan")
        )
        assert engine.generate(prompt, GREEDY)[0].outputs[0].finish_reason == "error"
    assert engine.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert all_blocks_are_back(engine)


def test_a_part_of_one_request_is_not_taken_for_another_request(make_engine, all_blocks_are_back):
    engine = make_engine()
    several = engine.add_request([5, 6], SamplingParams(n=2, max_tokens=4, ignore_eos=True), request_id="a")
    one = engine.add_request([7, 8, 9], GREEDY, request_id="a#0")
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert [len(each.token_ids) for each in finished[several].outputs] == [4, 4]
    assert len(finished[one].outputs[0].token_ids) == 8
    assert all_blocks_are_back(engine)


def test_a_scheduler_that_never_schedules_is_an_error_and_no_hang(make_engine, all_blocks_are_back):
    engine = make_engine(scheduler="null")
    (output,) = engine.generate([[5, 6, 7]], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert "the scheduler chose nothing; name another one" in (output.outputs[0].error or "")
    assert not engine.has_unfinished_requests()
    all_blocks_are_back(engine)


def test_a_scheduler_may_serve_running_requests_in_any_order(make_engine, monkeypatch, all_blocks_are_back):
    prompts = [list(range(5, 5 + length)) for length in (90, 30, 60)]
    expected = tokens_of(make_engine(enable_prefix_caching=False).generate(prompts, GREEDY))
    engine = make_engine(num_blocks=64, block_size=4, max_num_batched_tokens=24)
    ir = engine.client.core.scheduler._ir
    engine.client.core.parts.passes.set_passes("share=none,chunk=none")
    schedule, num_turned = ir.schedule, 0

    def turned(**state):
        nonlocal num_turned
        plan = schedule(**state)
        num_turned += len(plan.rows) > 1
        served = {name: getattr(plan, name)[::-1] for name in ("rows", "num_tokens", "num_new_blocks")}
        return replace(plan, **served)

    monkeypatch.setattr(ir, "schedule", turned)
    assert tokens_of(engine.generate(prompts, GREEDY)) == expected
    assert num_turned > 1
    assert all_blocks_are_back(engine)


def test_a_request_that_pins_keep_out_ends_alone_and_says_so(make_engine, all_blocks_are_back):
    engine = make_engine(num_blocks=32, block_size=16, max_num_batched_tokens=512)
    pinned = list(range(10, 130)) + list(range(10, 130)) + list(range(10, 26))
    engine.generate(pinned, GREEDY)
    assert engine.client.core.kv.cache.pin(pinned).num_pinned_blocks == 16
    long = engine.add_request([5, 6, 7] * 110, GREEDY)
    short = [engine.add_request([8, 9, 10 + index] * 6, GREEDY) for index in range(3)]
    finished = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    assert "16 are pinned; unpin some" in finished[long].outputs[0].error
    assert all(finished[each].outputs[0].finish_reason == "length" for each in short)
    engine.client.core.kv.cache.unpin(pinned)
    assert all_blocks_are_back(engine)


@dataclass(frozen=True)
class LastFirst(SchedulerPassProtocol):
    """Admits in the opposite order."""

    name = "last-first"

    def run(self, ir):
        return ir.order_pending(ir.admission[::-1]) if len(ir.pending) > 1 else ir


def test_a_request_without_room_ends_even_if_it_is_not_the_first_in_the_queue(make_engine):
    engine = make_engine(num_blocks=32, block_size=16, max_num_batched_tokens=512)
    engine.client.core.scheduler._ir.add_optimization_pass(LastFirst())
    pinned = list(range(10, 130)) + list(range(10, 130)) + list(range(10, 26))
    engine.generate(pinned, GREEDY)
    assert engine.client.core.kv.cache.pin(pinned).num_pinned_blocks == 16
    fits = engine.add_request([8, 9, 10] * 6, GREEDY)
    blocked = engine.add_request([5, 6, 7] * 110, GREEDY)
    finished = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    assert "are pinned" in finished[blocked].outputs[0].error
    assert finished[fits].outputs[0].finish_reason == "length"


class Holding(SchedulerPassProtocol):
    """Keeps every sequence from advancing, in one way or another, until `until` on the engine's clock."""

    name = "holding"

    def __init__(self, how: str, until: float = float("inf")) -> None:
        self.how, self.until = how, until

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        if ir.now >= self.until:
            return ir
        if self.how == "defer":
            return ir.defer(range(len(ir.pending)), "not yet")
        return ir.lower(**{self.how: 0})


@pytest.mark.parametrize("how", ["defer", "max_num_seqs", "max_num_batched_tokens", "available_memory"])
def test_passes_that_hold_everything_back_are_told(make_engine, all_blocks_are_back, monkeypatch, how):
    monkeypatch.setattr("sagellm.engines.engine_core.core._MAX_HELD_NS", 0)
    engine = make_engine()
    engine.client.core.scheduler._ir.add_optimization_pass(Holding(how))
    (output,) = engine.generate([[5, 6, 7]], GREEDY)
    assert "passes decided: holding: " in (output.outputs[0].error or "")
    assert all_blocks_are_back(engine)


def test_a_pass_may_hold_requests_back_for_a_while(make_engine, expected, monkeypatch):
    monkeypatch.setattr("sagellm.engines.engine_core.core._MAX_IDLE_STEPS", 3)
    engine = make_engine()
    until = engine.client.core._clock.now_ns() / 1e9 + 0.1
    engine.client.core.scheduler._ir.add_optimization_pass(Holding("defer", until))
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected
