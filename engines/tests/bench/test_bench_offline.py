"""`measure_throughput` and `measure_latency` with a small engine."""

from __future__ import annotations

import pytest

from sagellm.core import ConfigError
from sagellm.engines.bench import (
    BenchmarkError,
    Lengths,
    OfflineSettings,
    measure_latency,
    measure_throughput,
)

LENGTHS = {"input_len": Lengths.parse("uniform:8:16"), "output_len": Lengths.parse("4")}


def test_throughput_counts_requests_and_tokens(make_engine):
    figures = measure_throughput(make_engine(), OfflineSettings(num_prompts=5, **LENGTHS))
    assert (figures.num_requests, figures.num_output_tokens, figures.num_cached_tokens) == (5, 20, 0)
    assert 40 <= figures.num_prompt_tokens <= 80
    assert figures.output_throughput_tokens_per_s == pytest.approx(20 / figures.duration_s)
    total = figures.num_prompt_tokens + 20
    assert figures.total_throughput_tokens_per_s == pytest.approx(total / figures.duration_s)


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
        self._engine, self.geometry = engine, engine.geometry

    def generate(self, *arguments, **options):
        outputs = self._engine.generate(*arguments, **options)
        outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].error = "error", "it burst"
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
