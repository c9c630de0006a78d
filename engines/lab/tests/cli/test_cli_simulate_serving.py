"""`simulate --cost` and `bench fit`: a table, JSON, files, and clear errors."""

from __future__ import annotations

import json

import pytest

from sagellm.core import StepWork, TraceRequest
from sagellm.lab.bench.step_fit import MeasuredStep, write_steps
from sagellm.lab.traces import write_trace

COSTS = {
    "source": "by hand",
    "device": "cuda",
    "step": {"base_ns": 1_000_000, "token_ns": 10_000},
    "kv_bytes_per_token": 1000,
    "kv_memory_bytes": 16_000_000,
}


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return path


@pytest.fixture
def trace(tmp_path):
    requests = [
        TraceRequest(0.01 * i, 100 + i, 1 + i % 7, tenant="ab"[i % 2], priority=i % 3) for i in range(30)
    ]
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests)
    return path


def test_it_prints_the_pipeline_and_its_figures(trace, costs, sage):
    passes = "share=none,chunk=chunked-prefill{min_share=0.5}"
    lines = sage("llm", "simulate", trace, "--cost", costs, "--passes", passes).out.splitlines()
    assert lines[0].startswith("30 requests, 1,000 blocks of 16; ")
    assert lines[1].endswith("by hand")
    assert lines[3].startswith("PASSES")
    assert lines[4].split()[0] == "shortest,chunked-prefill{min_share=0.5}"


def test_json_and_files_have_every_request(trace, costs, sage, tmp_path):
    requests, picture = tmp_path / "requests.jsonl", tmp_path / "runs.svg"
    found = sage(
        "llm", "simulate", trace, "--cost", costs, "--passes", "order=none,share=none,chunk=none", "--json",
        "--requests", requests, "--plot", picture, "--num-blocks", "64", "--stretch", "0.5",
    ).json  # fmt: skip
    assert (found["passes"], found["num_requests"], found["num_blocks"]) == ("none", 30, 64)
    assert set(found["by_priority"]) == {"0", "1", "2"}
    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    assert [row["arrival_ns"] for row in rows][:3] == [0, 5_000_000, 10_000_000]
    assert sum(row["num_output_tokens"] for row in rows) == sum(1 + i % 7 for i in range(30))
    assert picture.read_text().lstrip().startswith("<?xml")


def test_the_scores_of_the_predictor_are_printed(trace, costs, sage):
    out = sage("llm", "simulate", trace, "--cost", costs).out
    assert "lifetime predictor statistical: " in out
    exact = sage("llm", "simulate", trace, "--cost", costs, "--oracle", "0")
    assert "lifetime predictor oracle: 26 predictions are off by 0.0 tokens on average" in exact.out
    scores = sage("llm", "simulate", trace, "--cost", costs, "--oracle", "0", "--json").json["predictor"]
    assert (scores["num_predictions"], scores["num_cut"], scores["within_10_percent"]) == (30, 4, 1.0)


def test_limits_decide_what_is_good(trace, costs, sage):
    arguments = ("llm", "simulate", trace, "--cost", costs, "--json")

    def num_good(*flags: str) -> int:
        return sage(*arguments, *flags).json["num_good"]

    assert num_good() == 30
    assert num_good("--max-ttft-s", "0", "--max-ttft-prefills", "0") == 0
    assert 0 < num_good("--max-tpot-ms", "0") < 30, "those of one token have no TPOT"


def test_the_same_command_prints_the_same(trace, costs, sage):
    arguments = ("llm", "simulate", trace, "--cost", costs, "--json", "--oracle", "0.5")
    assert sage(*arguments).out == sage(*arguments).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cost", "/nowhere/costs.json"), "cannot be read"),
        (("--cost", "COSTS", "--cache-only"), "choose one"),
        (("--cost", "COSTS", "--capacity", "50"), "--num-blocks"),
        (("--cost", "COSTS", "--passes", "order=fastest"), "fastest"),
        (("--cost", "COSTS", "--stretch", "-1"), "stretch is -1"),
        (("--cost", "COSTS", "--eviction-policy", "lru,fifo"), "simulated with one"),
        (("--cost", "COSTS", "--tenant-weights", "a:3"), "write name=2.5"),
        (("--cache-only",), "--capacity"),
        (("--capacity", "50", "--passes", "order=mlfq"), "--passes is for serving"),
        ((), "simulate serving with --cost"),
    ],
)
def test_what_is_wrong_is_said(trace, costs, sage, arguments, message):
    given = [costs if each == "COSTS" else each for each in arguments]
    result = sage("llm", "simulate", trace, *given)
    assert result.code in (1, 2)
    assert message in result.err
    assert "Traceback" not in result.err


def test_costs_are_fitted_saved_and_simulated(trace, sage, tmp_path):
    costs, steps = tmp_path / "fitted.json", tmp_path / "steps.jsonl"
    fitted = sage(
        "llm", "bench", "fit", "embedded", "--dtype", "float32", "--device", "cpu", "--num-blocks", "128",
        "--duration", "0.5", "--max-seqs", "6", "--max-prompt-tokens", "40", "--save", costs,
        "--record", steps,
    )  # fmt: skip
    assert "median step error" in fitted.out
    assert f"wrote the costs to {costs}, for `simulate` and `ab` with --cost {costs}" in fitted.out
    again = sage("llm", "bench", "fit", "--steps", steps, "--json").json
    assert again["num_steps"] == len(steps.read_text().splitlines())
    assert json.loads(costs.read_text())["step"] == again["step"]
    found = sage("llm", "simulate", trace, "--cost", costs, "--json").json
    assert found["cost"].startswith("fitted to ")
    assert f"median error of a step {again['median_error']:.0%}" in found["cost"]
    refused = sage("llm", "bench", "fit", "--steps", steps, "--duration", "3")
    assert (refused.code, "runs nothing" in refused.err) == (2, True)


def test_a_fit_that_is_far_off_warns(sage, tmp_path):
    quiet, busy = tmp_path / "quiet.jsonl", tmp_path / "busy.jsonl"
    works = [StepWork(n, 1, 100 * n, 100 * n) for n in range(1, 101)]
    write_steps(quiet, [MeasuredStep(one, 1_000_000 + 10_000 * one.num_tokens) for one in works])
    write_steps(busy, [MeasuredStep(one, 1_000_000 * (1 + 3 * (n % 2))) for n, one in enumerate(works)])
    assert "Warning" not in sage("llm", "bench", "fit", "--steps", quiet).err
    assert "in the median step: was the machine busy with other work?" in (
        sage("llm", "bench", "fit", "--steps", busy).err
    )
