from __future__ import annotations

from sagellm.core import PluginRegistry, Randomness, Runtime, VirtualClock, hookimpl
from sagellm.core.runtime import MemoryFiles
from sagellm.engines import SamplingParams
from sagellm.engines.text import IncrementalDetokenizer


def test_engine_metrics_are_a_snapshot_with_every_module(make_engine):
    engine = make_engine(quantization="int8")
    before = engine.metrics()
    engine.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3))
    after = engine.metrics()
    assert (before.num_finished, after.num_finished) == (0, 1)
    assert set(after.modules) == {
        *("attention_backend", "eviction_policy", "forward_backend", "grammar", "kv_pool"),
        *("lifetime_predictor", "logits_processor", "model_family", "prefix_cache", "quantizer"),
        *("recorder", "scheduler", "scheduler_pass", "batching", "step_cost", "work"),
    }
    for kind in ("attention_backend", "forward_backend", "scheduler"):
        assert before.modules[kind].num_steps == 0 < after.modules[kind].num_steps


def test_times_are_the_clocks_from_its_first_nanosecond_on(make_engine):
    clock = VirtualClock()
    engine = make_engine(runtime=Runtime(clock=clock, randomness=Randomness(0), files=MemoryFiles()))
    engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        clock.advance_ns(10)
    metrics = outputs[-1].metrics
    assert (metrics.first_token_ns, metrics.last_token_ns, metrics.finished_ns) == (0, 20, 20)
    assert (metrics.ttft, metrics.tpot) == (0.0, 10e-9)


def test_tpot_counts_the_tokens_of_one_continuation(make_engine):
    clock = VirtualClock()
    engine = make_engine(runtime=Runtime(clock=clock, randomness=Randomness(0), files=MemoryFiles()))
    engine.add_request([5, 6, 7], SamplingParams(n=4, max_tokens=5, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        clock.advance_ns(10)
    metrics = outputs[-1].metrics
    assert (metrics.num_output_tokens, metrics.num_longest_output_tokens) == (20, 5)
    assert metrics.tpot == 10e-9


def test_observers_are_told_the_reason_that_the_caller_is_told(make_engine, monkeypatch):
    reasons = []

    class Observer:
        @hookimpl
        def sagellm_request_finished(self, record):
            reasons.append(record.finish_reason)

    def fail(self, token_ids):
        raise ValueError("no text")

    registry = PluginRegistry.load()
    registry.register(Observer(), distribution="observer")
    engine = make_engine(registry=registry)
    stop = engine.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    text = stop[0].outputs[0].text
    engine.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, stop=text[1:3]))
    engine.abort_request(engine.add_request([5, 6, 7]))
    monkeypatch.setattr(IncrementalDetokenizer, "append", fail)
    failed = engine.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8))
    assert failed[0].outputs[0].finish_reason == "error"
    assert reasons == ["length", "stop", "abort", "error"]
