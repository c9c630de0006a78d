"""Files of step costs: the stated roofline, what is written is read, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sagellm.core import ConfigError, StepCost
from sagellm.lab.simulation.step_costs import StepCosts, read_step_costs, write_step_costs

ROOFLINE = Path(__file__).parents[3] / "benchmarks" / "cost" / "h200-8b.json"
GOOD = {"source": "by hand", "device": "cuda", "step": {"base_ns": 5}}


@pytest.mark.skipif(not ROOFLINE.exists(), reason="benchmarks are not beside the tests")
def test_the_roofline_follows_from_the_shape_and_the_data_sheet():
    costs = read_step_costs(ROOFLINE)
    layers, hidden, kv, intermediate, vocab = 32, 4096, 8 * 128, 14336, 128256
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate)
    head = hidden * vocab
    bandwidth, products, attention = 4.8e12 * 0.8, 989e12 * 0.6, 989e12 * 0.4
    step = costs.step
    assert step.base_ns == pytest.approx(0.5e6 + 2e9 * (weights + head) / bandwidth, rel=1e-4)
    assert step.token_ns == pytest.approx(2e9 * weights / products, rel=1e-4)
    assert step.seq_ns == pytest.approx(2e9 * head / products, rel=1e-3)
    assert costs.kv_bytes_per_token == 2 * layers * kv * 2
    assert step.kv_token_ns == pytest.approx(1e9 * costs.kv_bytes_per_token / bandwidth, rel=1e-3)
    assert step.pair_ns == pytest.approx(4e9 * layers * hidden / attention, rel=1e-3)
    assert costs.kv_memory_bytes == pytest.approx(0.9 * 141e9 - 2 * (weights + 2 * head), rel=1e-6)
    assert costs.num_blocks(512) == 1651


def test_what_is_written_is_read(tmp_path):
    costs = StepCosts(
        source="by hand",
        device="cpu",
        step=StepCost(base_ns=1.5, prefill_ns=3.0),
        host_step_ns=7.5,
        host_request_ns=2.0,
        kv_bytes_per_token=100,
        kv_memory_bytes=160_000,
        tier_bytes_per_s={"host": 1e9},
        about={"model": "tiny"},
    )
    write_step_costs(tmp_path / "costs.json", costs)
    assert read_step_costs(tmp_path / "costs.json") == costs
    assert costs.num_blocks(16) == 100
    with pytest.raises(ConfigError, match="cannot be written"):
        write_step_costs(tmp_path / "nowhere" / "costs.json", costs)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "it must be an object"),
        ({}, "source is missing"),
        (GOOD | {"source": ""}, "source must be a text"),
        (GOOD | {"device": "tpu"}, "device is 'tpu'"),
        (GOOD | {"host_step_ns": -1}, "host_step_ns is -1"),
        (GOOD | {"host_request_ns": "1"}, "host_request_ns is '1'"),
        (GOOD | {"step": {"base_ms": 5}}, "has no 'base_ms'"),
        (GOOD | {"step": {"base_ns": -5}}, "base_ns is -5"),
        (GOOD | {"step": {"base_ns": "5"}}, "step.base_ns is '5'"),
        (GOOD | {"step": {"base_ns": True}}, "step.base_ns is True"),
        (GOOD | {"step": {}}, "every coefficient of step is 0"),
        (GOOD | {"step": 5}, "step is 5"),
        (GOOD | {"kv_bytes_per_token": 0}, "kv_bytes_per_token is 0"),
        (GOOD | {"tier_bytes_per_s": {"host": 0}}, "tier_bytes_per_s.host is 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, message):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as raised:
        read_step_costs(path)
    assert str(path) in str(raised.value)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read: No such file"):
        read_step_costs(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        read_step_costs(tmp_path / "broken.json")
