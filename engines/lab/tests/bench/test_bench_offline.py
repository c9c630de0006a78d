"""`measure_throughput` and `measure_latency` with a small engine."""

from __future__ import annotations

import pytest

from sagellm.core import ConfigError
from sagellm.engines import LLMEngine
from sagellm.engines.metrics.flops import decode_flops, prefill_flops
from sagellm.engines.metrics.limits import Limits, measure_limits
from sagellm.engines.testing import make_checkpoint
from sagellm.lab.bench import (
    BenchmarkError,
    Lengths,
    OfflineSettings,
    measure_latency,
    measure_throughput,
)
from sagellm.lab.bench.offline import memory_figures

LENGTHS = {"input_len": Lengths.parse("uniform:8:16"), "output_len": Lengths.parse("4")}


def test_throughput_counts_requests_and_tokens(make_engine):
    figures = measure_throughput(make_engine(), OfflineSettings(num_prompts=5, **LENGTHS))
    assert (figures.num_requests, figures.num_output_tokens, figures.num_cached_tokens) == (5, 20, 0)
    assert 40 <= figures.num_prompt_tokens <= 80
    assert figures.output_throughput_tokens_per_s == pytest.approx(20 / figures.duration_s)
    total = figures.num_prompt_tokens + 20
    assert figures.total_throughput_tokens_per_s == pytest.approx(total / figures.duration_s)


def test_throughput_says_how_many_draft_tokens_were_accepted(make_engine):
    settings = OfflineSettings(num_prompts=3, input_len=Lengths.parse("32"), output_len=Lengths.parse("64"))
    drafting = make_engine(speculation="ngram{min_match=1}", adaptive_speculation=False)
    figures = measure_throughput(drafting, settings)
    assert figures.num_draft_tokens > 0
    assert 0 <= figures.draft_acceptance <= 1
    assert measure_throughput(make_engine(), settings).num_draft_tokens is None


def test_a_common_prefix_is_cached(make_engine):
    settings = OfflineSettings(
        num_prompts=4, input_len=Lengths.parse("64"), output_len=Lengths.parse("2"), prefix_share=0.75
    )
    assert measure_throughput(make_engine(block_size=8), settings).num_cached_tokens > 0


def test_latency_times_batches_of_prompts_that_are_not_cached(make_engine):
    engine = make_engine(block_size=8)
    figures = measure_latency(engine, OfflineSettings(num_prompts=2, repeats=3, **LENGTHS))
    assert (figures.latency_ms.count, figures.ttft_ms.count, figures.tpot_ms.count) == (3, 6, 6)
    assert figures.latency_ms.min <= figures.latency_ms.median <= figures.latency_ms.p99
    assert figures.ttft_ms.max < figures.latency_ms.max


class FailingEngine:
    """Runs prompts, and one of them fails."""

    def __init__(self, engine):
        self._engine, self._num_failed = engine, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self):
        outputs = self._engine.step()
        for output in outputs:
            if output.finished and not self._num_failed:
                self._num_failed += 1
                output.outputs[0].finish_reason, output.outputs[0].error = "error", "it burst"
        return outputs


def test_a_prompt_that_fails_leaves_no_figures(make_engine):
    engine = FailingEngine(make_engine())
    with pytest.raises(BenchmarkError, match="1 of 2 prompts failed: it burst"):
        measure_latency(engine, OfflineSettings(num_prompts=2, **LENGTHS))


@pytest.mark.parametrize(
    "settings", [{"num_prompts": 0}, {"num_prompts": 1, "repeats": 0}, {"num_prompts": 1, "prefix_share": 2}]
)
def test_senseless_offline_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        OfflineSettings(**settings)


def test_throughput_is_set_against_the_limits_that_were_measured(make_engine, monkeypatch):
    limits = Limits(peak_flops_per_s=1e12, read_bandwidth_bytes_per_s=1e10, peak_source="a test's")
    monkeypatch.setattr("sagellm.lab.bench.offline.engine_limits", lambda _: limits)
    engine = make_engine(max_num_seqs=2, enable_prefix_caching=False)
    settings = OfflineSettings(
        num_prompts=4, warmup=0, input_len=Lengths.parse("12"), output_len=Lengths.parse("3")
    )
    figures = measure_throughput(engine, settings)
    geometry = engine.geometry
    flops = 4 * (prefill_flops(geometry, 12) + decode_flops(geometry, 13) + decode_flops(geometry, 14))
    assert figures.mfu == pytest.approx(flops / (figures.duration_s * 1e12))
    work = engine.metrics().modules["work"]
    num_steps = engine.metrics().modules["forward_backend"].num_steps
    kv_bytes = 4 * (12 + 13 + 14) * engine.layout.block_bytes // engine.layout.block_size
    weight_bytes = engine.metrics().modules["model_family"].weight_bytes
    assert work.read_bytes == num_steps * weight_bytes + kv_bytes
    assert figures.bandwidth_use == pytest.approx(work.read_bytes / (figures.duration_s * 1e10))
    reached = max(flops / 1e12, work.read_bytes / 1e10) / figures.duration_s
    assert figures.roofline_ratio == pytest.approx(reached)
    assert figures.peak_source == "a test's"
    assert figures.mfu_error is None
    assert figures.batching_efficiency == 1.0


def test_an_engine_s_peak_is_that_of_its_own_number_format(tmp_path, machine):
    model = make_checkpoint(tmp_path / "model", family="qwen3", dtype="bfloat16", head_dim=32)
    settings = OfflineSettings(num_prompts=1, warmup=0, **LENGTHS)
    with LLMEngine(model, num_blocks=64, device="cpu") as engine:
        assert engine.config.model.dtype == "bfloat16"
        figures = measure_throughput(engine, settings)
    assert (figures.peak_gflops_per_s, figures.gemm_gflops_per_s) == (2000, 100)
    assert figures.peak_source == "a loop of the widest bfloat16 instruction (amx), measured in this run"


def test_limits_are_measured_and_named():
    limits = measure_limits("cpu", "float16")
    assert limits.peak_flops_per_s > 1e8
    assert limits.read_bandwidth_bytes_per_s > 1e8
    assert limits.peak_source.startswith("torch's float")
    assert limits.peak_source.endswith(" product of 512 rows, measured in this run")


def test_gaps_between_tokens_and_tenths_of_the_run_are_counted(make_engine):
    settings = OfflineSettings(num_prompts=3, warmup=0, **LENGTHS)
    figures = measure_throughput(make_engine(), settings)
    assert (figures.itl_ms.count, figures.tpot_ms.count) == (3 * 3, 3)
    assert figures.output_tenths_tokens_per_s.count == 10
    assert figures.output_tenths_tokens_per_s.mean == pytest.approx(figures.output_throughput_tokens_per_s)


def test_memory_is_divided_into_weights_kv_and_the_rest(make_engine):
    engine = make_engine(num_blocks=64)
    memory = memory_figures(engine)
    assert memory.kv_capacity_mib == 64 * engine.layout.block_bytes / 2**20
    assert memory.weight_mib == engine.metrics().modules["model_family"].weight_bytes / 2**20
    rest = memory.peak_rss_mib - memory.weight_mib - memory.kv_capacity_mib
    assert memory.beyond_mib == pytest.approx(rest)
