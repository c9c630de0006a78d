"""Fitting what steps cost: exact for exact steps, robust, written and read, and measured on a real engine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from sagellm.core import ConfigError, StepCost, StepWork
from sagellm.engines.config.schema import EngineConfig
from sagellm.lab.bench.errors import BenchmarkError
from sagellm.lab.bench.step_fit import (
    FitSettings,
    MeasuredStep,
    _HostCosts,
    fit_steps,
    measure_steps,
    read_steps,
    write_steps,
)
from sagellm.lab.simulation.step_costs import StepCosts

TRUE = StepCost(
    base_ns=900_000, token_ns=20_000, seq_ns=9_000, kv_token_ns=300, pair_ns=12, prefill_ns=200_000
)
BARE = StepCosts(source="-", device="cpu", step=StepCost(base_ns=1.0), about={"model": "tiny"})


def steps(noise: float = 0.0, seed: int = 0, num_steps: int = 500) -> list[MeasuredStep]:
    rng = Random(seed)
    made = []
    for _ in range(num_steps):
        num_decodes, num_prompts = rng.randint(1, 40), rng.choice((0, 0, 1, 3))
        chunk = rng.randint(2, 300) * num_prompts
        context = rng.randint(10, 2000)
        work = StepWork(
            num_decodes + chunk,
            num_decodes + num_prompts,
            num_decodes * context + chunk,
            num_decodes * context + chunk * chunk // 2,
            num_prompts,
        )
        took = TRUE.predict_ns(work) * rng.lognormvariate(0, noise)
        made.append(MeasuredStep(work, round(took)))
    return made


def test_exact_steps_are_fitted_exactly():
    costs, figures = fit_steps(steps(), BARE)
    assert figures.median_error < 0.01
    assert figures.held_out_median_error < 0.01
    assert costs.step.token_ns == pytest.approx(TRUE.token_ns, rel=0.05)
    assert costs.step.prefill_ns == pytest.approx(TRUE.prefill_ns, rel=0.1)
    assert costs.source.startswith("fitted to 500 steps of tiny")
    assert costs.about["num_steps"] == 500


def test_the_total_includes_slow_outliers():
    measured = steps(0.05)
    slow = [MeasuredStep(one.work, one.took_ns * (4 if n % 20 == 0 else 1)) for n, one in enumerate(measured)]
    costs, figures = fit_steps(slow, replace(BARE, host_step_ns=500.0))
    predicted = sum(costs.step.predict_ns(one.work) + costs.host_step_ns - 500 for one in slow)
    assert predicted == pytest.approx(sum(one.took_ns for one in slow))
    assert figures.median_error < 0.1


def test_what_disturbs_short_steps_does_not_make_long_ones_longer():
    """Every tenth step is interrupted for 2 ms, nine tenths of the steps are short."""
    rng = Random(7)
    works = [
        StepWork(2048, 4, 2048, 1_000_000, 4)
        if rng.random() < 0.1
        else StepWork(5, 5, rng.randint(50, 3000), 0)
        for _ in range(2000)
    ]
    measured = [
        MeasuredStep(
            work,
            round(TRUE.predict_ns(work) * rng.lognormvariate(0, 0.05)) + 2_000_000 * (number % 10 == 0),
        )
        for number, work in enumerate(works)
    ]
    costs, _ = fit_steps(measured, BARE)
    long, short = works[[work.num_tokens for work in works].index(2048)], StepWork(5, 5, 1000, 0)
    for work in (long, short):
        assert costs.step.predict_ns(work) == pytest.approx(TRUE.predict_ns(work), rel=0.02)
    assert costs.host_step_ns == pytest.approx(200_000, rel=0.2)


def test_too_few_steps_are_refused():
    with pytest.raises(BenchmarkError, match="7 steps were recorded"):
        fit_steps(steps(num_steps=7), BARE)


def test_recorded_steps_are_read_back(tmp_path):
    measured = steps(num_steps=30)
    write_steps(tmp_path / "steps.jsonl", measured)
    assert read_steps(tmp_path / "steps.jsonl") == measured


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", "line 1 must have num_tokens"),
        ("[1]\n", "line 1 must have"),
        ("{\n", "line 1: it is not valid JSON"),
        (
            '{"num_tokens": 1, "num_seqs": 0, "num_kv_tokens": 1, "num_pairs": 1, "num_prefills": 0, '
            '"took_ns": 5}',
            "num_seqs is 0",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, message):
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_steps(path)


def test_steps_of_the_embedded_model_are_measured():
    config = EngineConfig().with_values(
        {"kv.num_blocks": 256, "model.dtype": "float32", "model.device": "cpu"}
    )
    settings = FitSettings(duration_s=0.5, max_seqs=8, max_prompt_tokens=60, max_output_tokens=8)
    measured, bare = measure_steps(config, settings)
    assert len(measured) >= 20
    assert any(one.work.num_prefills for one in measured)
    assert any(one.work.num_prefills == 0 for one in measured)
    costs, figures = fit_steps(measured, bare)
    assert costs.step.predict_ns(measured[0].work) > 0
    assert (costs.device, figures.num_steps) == ("cpu", len(measured))
    assert costs.num_blocks(16) == 256


WRITTEN_SHARE = """
import os
from pathlib import Path
from sagellm.engines import EngineConfig
from sagellm.lab.bench.step_fit import RecordedCore

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident_bytes()
with RecordedCore(EngineConfig().with_values({"kv.num_blocks": 4096, "model.device": "cpu"})) as recorded:
    print((resident_bytes() - before) / recorded.costs().kv_memory_bytes)
"""


def test_no_step_is_measured_on_memory_that_was_never_written():
    program = [sys.executable, "-c", WRITTEN_SHARE]  # a process that has freed no memory that KV could get
    assert float(subprocess.run(program, check=True, capture_output=True, text=True).stdout) > 0.9


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="duration_s is 0"):
        FitSettings(duration_s=0)


def test_the_time_of_the_host_is_divided_between_steps_and_requests():
    runs = [(10, 3, 10 * 40 + 3 * 700), (100, 5, 100 * 40 + 5 * 700), (7, 9, 7 * 40 + 9 * 700)]
    assert _HostCosts.of(runs) == pytest.approx((40, 700))
    assert _HostCosts.of([]) == (0, 0)
    assert _HostCosts.of([(10, 1, 1000), (10, 2, 900)]) == pytest.approx((95, 0)), "requests cost nothing"
    assert _HostCosts.of([(10, 1, 1000), (20, 1, 900)]) == pytest.approx((0, 950))
