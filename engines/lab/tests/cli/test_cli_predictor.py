"""`predictor train` and `predictor score` on a recorded trace."""

from __future__ import annotations

import json
import random

import pytest

from sagellm.core import TraceRequest, pack
from sagellm.lab.traces import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace of 600 requests, one of whose words tells how long the answer is."""
    rng, requests = random.Random(0), []
    for index in range(600):
        number = rng.randrange(1, 5)
        tokens = [5, 6, 1000 + number, *(rng.randrange(100, 150) for _ in range(rng.randrange(2, 8)))]
        requests.append(TraceRequest(0.5 * index, len(tokens), 5 * 3**number, token_ids=pack(tokens)))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl.xz"
    write_trace(path, requests)
    return str(path)


def test_predictors_are_scored_beside_controls(sage, trace, tmp_path):
    plot = tmp_path / "scores.svg"
    found = sage(
        *("llm", "predictor", "score", trace, "--predictor", "statistical"),
        *("--predictor", "online{base=ranker}", "--plot", str(plot), "--json"),
    )
    assert found.code == 0, found.err
    by_name = {each["name"]: each for each in json.loads(found.out)["predictors"]}
    assert list(by_name) == [
        *("constant median", "median by prompt length", "best constant in hindsight"),
        *("statistical", "online{base=ranker}"),
    ]
    ranker, constant = by_name["online{base=ranker}"], by_name["constant median"]
    assert ranker["mae_tokens"] < 0.8 * constant["mae_tokens"]
    assert b"<svg" in plot.read_bytes()[:500]


@pytest.mark.full
def test_a_trained_predictor_is_kept_in_a_file_and_serves(sage, trace, tmp_path):
    weights, plot = tmp_path / "weights", tmp_path / "losses.png"
    trained = sage(*("llm", "predictor", "train", trace, str(weights), "--epochs", "60", "--plot", str(plot)))
    assert trained.code == 0, trained.err
    assert "epochs: mean error" in trained.out
    assert plot.stat().st_size > 1000
    again = sage("llm", "predictor", "train", trace, str(weights), "--epochs", "60")
    assert (again.code, "--overwrite" in again.err) == (2, True), again.err
    name = f"transformer{{weights={weights}}}"
    scored = sage("llm", "predictor", "score", trace, "--predictor", name, "--json")
    constant, *_, found = json.loads(scored.out)["predictors"]
    assert found["name"].startswith("transformer")
    assert found["mae_tokens"] < 0.8 * constant["mae_tokens"]


def test_what_learns_while_it_serves_is_not_trained(sage, trace, tmp_path):
    found = sage("llm", "predictor", "train", trace, str(tmp_path / "w"), "--predictor", "statistical")
    assert (found.code, "learns while it serves" in found.err) == (2, True), found.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["score", "train"])
def test_a_trace_without_what_can_be_scored_is_refused_before_all_else(sage, tmp_path, command):
    requests = [
        TraceRequest(0.5 * index, 4, 9, token_ids=pack([5, 6, 7, index]), max_tokens=9 if index >= 70 else 99)
        for index in range(100)
    ]
    path, weights = tmp_path / "trace.jsonl", tmp_path / "weights"
    write_trace(path, requests)
    found = sage("llm", "predictor", command, str(path), *([str(weights)] if command == "train" else []))
    assert (found.code, "ended before its limit" in found.err) == (2, True), found.err
    assert list(tmp_path.iterdir()) == [path]


def test_bad_traces_are_named(sage, tmp_path):
    absent = sage("llm", "predictor", "score", str(tmp_path / "absent"))
    assert (absent.code, "absent" in absent.err) == (2, True)
    short = tmp_path / "short.csv"
    short.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    found = sage("llm", "predictor", "score", str(short))
    assert (found.code, "at least 20 are needed" in found.err) == (2, True), found.err
