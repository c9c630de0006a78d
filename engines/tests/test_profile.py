"""`profile`: where the time of steps goes, and its share of limits that a test states."""

from __future__ import annotations

import gc
import json

import pytest

from sagellm.core import ModelGeometry
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli.profile import as_text
from sagellm.engines.metrics.limits import Rate
from sagellm.engines.metrics.profile import (
    PartFigures,
    Profile,
    ProfileLimits,
    StepFigures,
)
from sagellm.engines.worker.work import WorkMeter, work_by_operation

BANDWIDTH, PEAK = 1e10, 1e12
LIMITS = ProfileLimits(read=Rate(BANDWIDTH, "stated"), peaks={"bfloat16": Rate(PEAK, "stated too")})
LAYER = ["norm", "qkv", "rope", "attend", "output", "norm", "gate_up", "down"]
TORCH_STEP = ["embed", "rope", *LAYER * 5, "norm", "head"]
OPERATIONS = set(TORCH_STEP)


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    monkeypatch.setattr("sagellm.engines.profiling.measured_limits", lambda model, device: LIMITS)


def embedded(**settings):
    """Make an engine of the embedded model in bfloat16."""
    return LLMEngine(device="cpu", dtype="bfloat16", num_blocks=64, profile=True, **settings)


def generate(engine, num_tokens=3):
    """Compute prompts of 5 and 3 tokens in one step, and decode in the others."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.generate([[5, 6, 7, 8, 9], [10, 11, 12]], params)


def steps_of(engine):
    return {steps.kind: steps for steps in engine.profile.figures().steps}


def by_name(steps):
    return {part.name: part for part in steps.parts}


def test_bytes_and_flops_of_the_embedded_model_by_hand():
    with embedded(forward_backend="torch") as engine:
        generate(engine)
        found = steps_of(engine)
    # 5 layers, h = 256, i = 704, 4 heads and 2 KV heads of 64: q = 256, kv = 128; vocabulary 4,096, tied
    decode, parts = found["decode"], by_name(found["decode"])
    # contexts of the two decodes are 6 + 4, then 7 + 5
    assert (decode.num_steps, decode.num_sequences, decode.num_tokens, decode.num_kv_tokens) == (2, 2, 2, 11)
    by_hand = {  # bytes of weights: 5 · h · n · 2; FLOPs: 2 tokens · 5 · 2 · h · n
        "qkv": (5 * 256 * 512 * 2, 2 * 5 * 2 * 256 * 512),
        "output": (5 * 256 * 256 * 2, 2 * 5 * 2 * 256 * 256),
        "gate_up": (5 * 256 * 1408 * 2, 2 * 5 * 2 * 256 * 1408),
        "down": (5 * 704 * 256 * 2, 2 * 5 * 2 * 704 * 256),
        "head": (4096 * 256 * 2, 2 * 2 * 256 * 4096),
        # KV of a token: 5 layers · 2 · kv · 2 bytes = 2,560; scores and sums: 5 · 4 · q · context
        "attend": (11 * 2560, 5 * 4 * 256 * 11),
    }
    assert {name: (parts[name].read_bytes, parts[name].flops) for name in by_hand} == by_hand
    for name in by_hand:
        num_bytes, flops = by_hand[name]
        limit_s = max(num_bytes / BANDWIDTH, flops / PEAK)
        assert parts[name].limit_share == pytest.approx(limit_s / (parts[name].mean_ms / 1e3))
        assert parts[name].limited_by == "reads"
    assert decode.whole.read_bytes == sum(num_bytes for num_bytes, _ in by_hand.values())
    assert decode.whole.flops == sum(flops for _, flops in by_hand.values())
    # causal: the prompts of 5 and 3 attend to 15 + 6 tokens, and their KV is read once
    prefill = by_name(found["prefill"])
    assert (prefill["attend"].read_bytes, prefill["attend"].flops) == (8 * 2560, 5 * 4 * 256 * 21)
    assert prefill["head"].flops == by_hand["head"][1]
    assert prefill["qkv"].flops == 4 * by_hand["qkv"][1]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_parts_add_up_to_the_step_and_operations_to_the_forward_pass(backend):
    with embedded(forward_backend=backend, enable_prefix_caching=False) as engine:
        generate(engine)  # allocates what later steps use
        engine.profile.clear()
        before_ns = engine.metrics().modules["forward_backend"].total_ns
        generate(engine, num_tokens=20)
        forward_ms = (engine.metrics().modules["forward_backend"].total_ns - before_ns) / 1e6
        found = steps_of(engine)
    assert found.keys() == {"prefill", "decode"}
    computed_ms = 0.0
    for steps in found.values():
        parts = by_name(steps)
        assert parts.keys() >= OPERATIONS | {"schedule", "prepare", "forward", "sample", "advance", "rest"}
        assert sum(part.mean_ms for part in steps.parts) == pytest.approx(steps.whole.mean_ms)
        assert sum(part.share for part in steps.parts) == pytest.approx(1)
        assert all(part.mean_ms > 0 for part in steps.parts)
        assert parts["attend"].num_calls == parts["down"].num_calls == 5 * steps.num_steps
        computed_ms += steps.num_steps * sum(parts[name].mean_ms for name in OPERATIONS)
    assert 0.2 * forward_ms < computed_ms < forward_ms  # the small model's rest is Python


def test_operations_are_spans_inside_the_forward_pass_of_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    with embedded(forward_backend="torch", trace=str(path)) as engine:
        generate(engine)
    events = json.loads(path.read_text())
    bounds = [
        (event["ts"], event["tid"]) for event in events if event["ph"] in "BE" and event["name"] == "forward"
    ]
    assert len(bounds) == 6
    operations = [event for event in events if event["ph"] == "X"]
    for (begin, thread), (end, _) in zip(bounds[::2], bounds[1::2], strict=True):
        inside = [each for each in operations if begin <= each["ts"] and each["ts"] + each["dur"] <= end]
        assert [each["name"] for each in inside] == TORCH_STEP
        assert {each["tid"] for each in inside} == {thread}
    assert len(operations) == 3 * len(TORCH_STEP)


def test_the_table_is_printed_once_when_the_engine_ends(capsys):
    engine = embedded()
    generate(engine)
    engine.close()
    engine.close()
    printed = capsys.readouterr()
    del engine
    gc.collect()
    assert capsys.readouterr().err == printed.out == ""
    assert printed.err.count("OPERATION  CALLS") == 2
    assert "decode: 2 steps; mean of one: 2.0 sequences, 2.0 new tokens, 11.0 tokens of KV" in printed.err
    assert "Limits of this machine" in printed.err


def test_an_engine_that_computed_nothing_prints_nothing(capsys):
    embedded().close()
    assert capsys.readouterr().err == ""


def test_a_step_that_needs_no_logits_does_not_read_the_head():
    with embedded(max_num_batched_tokens=4, enable_prefix_caching=False) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.generate([[5, 6, 7, 8, 9, 10, 11]], params)  # in steps of 4 and 3 tokens
        prefill = steps_of(engine)["prefill"]
    head = by_name(prefill)["head"]
    assert prefill.num_steps == 2
    assert (head.read_bytes, head.flops) == (4096 * 256 * 2 / 2, 2 * 256 * 4096 / 2)


def test_what_warms_an_engine_up_is_in_no_step():
    with embedded() as engine:
        engine.client.core.runner.work.add(Batch())
        generate(engine)
        assert by_name(steps_of(engine)["prefill"])["head"].flops == 2 * 2 * 256 * 4096


def test_a_model_whose_operations_are_unknown_has_the_whole_forward_pass(monkeypatch):
    from sagellm.engines.forward.torch_backend import TorchForwardBackend

    def not_reported(self, take):
        pass

    def without_operations(self):
        return type(self._model.metrics())(num_parameters=1, weight_bytes=2)

    monkeypatch.setattr(TorchForwardBackend, "report_operations", not_reported)
    monkeypatch.setattr(TorchForwardBackend, "model_metrics", without_operations)
    with embedded(forward_backend="torch") as engine:
        generate(engine)
        decode = steps_of(engine)["decode"]
    assert not by_name(decode).keys() & OPERATIONS
    assert by_name(decode)["forward"].share > 0.3
    assert decode.whole.limit_share is None


def test_without_the_setting_there_is_no_profile():
    with LLMEngine(device="cpu", num_blocks=64) as engine:
        assert engine.profile is None


def test_the_limits_are_the_best_that_were_measured(monkeypatch):
    found = [
        ProfileLimits(read=Rate(3e9, "before"), peaks={"bfloat16": Rate(2e12, "before")}),
        ProfileLimits(read=Rate(9e9, "after"), peaks={"bfloat16": Rate(1e12, "after")}),
    ]
    monkeypatch.setattr("sagellm.engines.profiling.measured_limits", lambda model, device: found.pop(0))
    with embedded() as engine:
        generate(engine)
        limits = engine.profile.figures().limits
        assert engine.profile.figures().limits == limits
    assert limits == ProfileLimits(read=Rate(9e9, "after"), peaks={"bfloat16": Rate(2e12, "before")})


WINDOWS = ModelGeometry(
    num_layers=4,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=32,
    max_model_len=64,
)


class Batch:
    query_lens = [3, 1]  # noqa: RUF012
    seq_lens = [10, 2]  # noqa: RUF012
    logits_indices = (2, 3)


def test_layers_with_a_window_attend_to_it_alone():
    meter = WorkMeter([4, 4, None, 4])
    meter.add(Batch())
    # windowed: 3 · 4 and 2 tokens, of which 4 + 2 and 2 are read; the others: 8 + 9 + 10 and 2, of 10 and 2
    assert meter.counts.num_context_tokens == (3 * (12 + 2) + 27 + 2) / 4
    assert meter.counts.num_kv_tokens == (3 * (6 + 2) + 10 + 2) / 4

    class Layout:
        block_bytes, block_size = 16 * 100, 16

    work = work_by_operation(meter.counts, WINDOWS, Layout(), {})
    assert work["attend"] == (4 * 2 * 4 * 2 * (3 * 14 + 29) // 4 * 2, 36 / 4 * 100)


def test_the_table_shows_each_part_with_its_share_of_the_limit():
    parts = [
        PartFigures(name="schedule", num_calls=2, median_ms=0.05, mean_ms=0.06, share=0.03),
        PartFigures(
            name="qkv",
            num_calls=56,
            median_ms=1.5,
            mean_ms=1.25,
            share=0.625,
            read_bytes=1_310_720,
            flops=99_960_000_000,
            limited_by="products",
            limit_share=1.204,
        ),
    ]
    whole = PartFigures(name="step", num_calls=2, median_ms=2, mean_ms=2, share=1)
    steps = StepFigures(
        kind="mixed",
        num_steps=1,
        num_sequences=1.5,
        num_tokens=130,
        num_kv_tokens=20_000.5,
        parts=parts,
        whole=whole,
    )
    lines = as_text(Profile(steps=[steps], limits=LIMITS)).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "mixed: 1 step; mean of one: 1.5 sequences, 130.0 new tokens, 20000.5 tokens of KV",
        "OPERATION CALLS MEDIAN MEAN SHARE READ COMPUTED LIMIT OF LIMIT",
        "schedule 2 0.050 ms 0.060 ms 3.0% - - - -",
        "qkv 56 1.500 ms 1.250 ms 62.5% 1.31 MB 100 GFLOP products 120%",
        "step 2 2.000 ms 2.000 ms 100.0% - - - -",
        "",
        "Limits of this machine, measured before and after: 10.0 GB/s read (stated); "
        "1.00 TFLOP/s in bfloat16 (stated too).",
        "What is above its limit came from a cache, or the machine was busy while it was measured.",
    ]
