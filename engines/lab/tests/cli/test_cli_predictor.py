"""`predictor train` and `predictor score` on a recorded trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).parents[4] / "benchmarks" / "traces" / "embedded_templates.jsonl.xz"


def test_predictors_are_scored_beside_controls(sage, tmp_path):
    plot = tmp_path / "scores.svg"
    found = sage(
        *("llm", "predictor", "score", str(TEMPLATES), "--predictor", "statistical"),
        *("--predictor", "online{base=ranker}", "--plot", str(plot), "--json"),
    )
    assert found.code == 0, found.err
    by_name = {each["name"]: each for each in json.loads(found.out)["predictors"]}
    assert list(by_name) == [
        *("constant median", "median by prompt length", "best constant in hindsight"),
        *("statistical", "online{base=ranker}"),
    ]
    assert by_name["statistical"]["mae_tokens"] < 0.5 * by_name["constant median"]["mae_tokens"]
    assert b"<svg" in plot.read_bytes()[:500]


@pytest.mark.full
def test_a_trained_predictor_is_kept_in_a_file_and_serves(sage, tmp_path):
    weights, plot = tmp_path / "weights", tmp_path / "losses.png"
    trained = sage(
        *("llm", "predictor", "train", str(TEMPLATES), str(weights), "--epochs", "8", "--plot", str(plot))
    )
    assert trained.code == 0, trained.err
    assert "epochs: mean error" in trained.out
    assert plot.stat().st_size > 1000
    again = sage("llm", "predictor", "train", str(TEMPLATES), str(weights), "--epochs", "8")
    assert (again.code, "--overwrite" in again.err) == (2, True), again.err
    name = f"transformer{{weights={weights}}}"
    scored = sage("llm", "predictor", "score", str(TEMPLATES), "--predictor", name, "--json")
    (found,) = [each for each in json.loads(scored.out)["predictors"] if each["name"].startswith("transf")]
    assert found["mae_tokens"] < 5


def test_what_learns_while_it_serves_is_not_trained(sage, tmp_path):
    found = sage(
        "llm", "predictor", "train", str(TEMPLATES), str(tmp_path / "w"), "--predictor", "statistical"
    )
    assert (found.code, "learns while it serves" in found.err) == (2, True), found.err
    assert list(tmp_path.iterdir()) == []


def test_bad_traces_are_named(sage, tmp_path):
    absent = sage("llm", "predictor", "score", str(tmp_path / "absent"))
    assert (absent.code, "absent" in absent.err) == (2, True)
    short = tmp_path / "short.csv"
    short.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    found = sage("llm", "predictor", "score", str(short))
    assert (found.code, "at least 20 are needed" in found.err) == (2, True), found.err
