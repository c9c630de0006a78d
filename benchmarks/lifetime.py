"""How well output lengths are predicted at admission: `python benchmarks/lifetime.py`, some 5 s.

Each request is predicted when it arrives and learnt from when it ends, so none is scored by a predictor
that was trained on it. Two loads: open chat, which is the recorded Azure trace, and a regular batch job,
which is made here: four prompt templates whose answers vary by 5 % (one standard deviation). Controls on
both sides: the median of all output lengths, the best constant there is, and on the batch job the mean of
the request's own template, which nobody can better. An error is |predicted − true| in tokens.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from common import output_flags, publish, spread

from sagellm.core import PredictionRequest
from sagellm.engines.cli.output import columns
from sagellm.kvmgr.lifetime import StatisticalLifetimePredictor
from sagellm.lab.traces import read_trace

AZURE = Path(__file__).parent / "traces" / "azure_conv.csv.xz"
SECONDS_PER_TOKEN = 0.02
TEMPLATES = ((120, 40), (400, 60), (900, 100), (2000, 160))  # tokens of prompt, mean tokens of answer
TRUSTED = 0.8  # the confidence from which a prediction is used, by default


@dataclass(frozen=True)
class Request:
    """One request of a load; `ideal_tokens` is what can be known of its length beforehand, if stated."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ideal_tokens: int | None = None


def open_chat() -> list[Request]:
    """Return the Azure conversation trace: an hour of 2023."""
    return [Request(one.arrival_s, one.num_prompt_tokens, one.num_output_tokens) for one in read_trace(AZURE)]


def batch_job(num_requests: int = 5000, seed: int = 0) -> list[Request]:
    """Make a job of four templates, ten requests a second."""
    random = Random(seed)
    requests = []
    for number in range(num_requests):
        prompt, mean = random.choice(TEMPLATES)
        tokens = max(1, round(random.gauss(mean, 0.05 * mean)))
        requests.append(Request(number / 10, prompt + random.randrange(16), tokens, mean))
    return requests


def predict_all(requests: Sequence[Request]) -> tuple[list[float], list[float], list[float]]:
    """Return tokens and confidence of each request's prediction, and the microseconds that it took."""
    predictor = StatisticalLifetimePredictor()
    running: list[tuple[float, int]] = []
    lengths, confidences, us = [], [], []
    for number, request in enumerate(requests):
        while running and running[0][0] <= request.arrival_s:
            ended = heapq.heappop(running)[1]
            tokens = requests[ended].num_output_tokens
            predictor.update(
                sequence_id=str(ended), actual_length=tokens, actual_time=tokens * SECONDS_PER_TOKEN
            )
        question = PredictionRequest(
            sequence_id=str(number), token_ids=range(request.num_prompt_tokens), max_length=4096
        )
        began = time.perf_counter_ns()
        answer = predictor.predict(question)
        us.append((time.perf_counter_ns() - began) / 1000)
        lengths.append(answer.remaining_length)
        confidences.append(answer.confidence)
        end_s = request.arrival_s + request.num_output_tokens * SECONDS_PER_TOKEN
        heapq.heappush(running, (end_s, number))
    return lengths, confidences, us


def score(pairs: Iterable[tuple[float, int]]) -> dict[str, float | int | None]:
    """Score pairs of predicted and true tokens: mean absolute error, and shares that are near enough."""
    pairs = list(pairs)
    if not pairs:
        return {"num_scored": 0, "mae_tokens": None, "within_10_percent": None, "within_5_tokens": None}
    errors = [(abs(predicted - true), true) for predicted, true in pairs]
    return {
        "num_scored": len(errors),
        "mae_tokens": statistics.fmean(error for error, _ in errors),
        "within_10_percent": statistics.fmean(error <= 0.1 * true for error, true in errors),
        "within_5_tokens": statistics.fmean(error <= max(0.1 * true, 5) for error, true in errors),
    }


def measure(requests: Sequence[Request]) -> dict[str, Any]:
    """Score the predictor on one load, all of its predictions and those that an engine would use."""
    lengths, confidences, us = predict_all(requests)
    true = [one.num_output_tokens for one in requests]
    median = statistics.median(true)
    known = [(one.ideal_tokens, one.num_output_tokens) for one in requests if one.ideal_tokens is not None]
    pairs = list(zip(lengths, true, strict=True))
    return {
        "statistical": score(pairs),
        f"statistical, confidence >= {TRUSTED}": score(
            pair for pair, confidence in zip(pairs, confidences, strict=True) if confidence >= TRUSTED
        ),
        "control: the best constant": score((median, one) for one in true),
        "control: knows the template": score(known),
        "predict_us": spread(us),
    }


def as_text(loads: dict[str, dict[str, Any]]) -> str:
    """Show a table for each load."""
    parts = []
    for name, found in loads.items():
        rows = [
            (
                who,
                f"{one['num_scored']:,}",
                *(f"{one['mae_tokens']:.1f}", f"{one['within_10_percent']:.1%}"),
                f"{one['within_5_tokens']:.1%}",
            )
            for who, one in found.items()
            if one.get("num_scored")
        ]
        heads = (name.upper(), "SCORED", "MAE, TOKENS", "WITHIN 10 %", "OR 5 TOKENS")
        us = found["predict_us"]
        parts.append(f"{columns(heads, rows)}\npredict: {us['median']:.1f} us, p99 {us['p99']:.1f} us")
    return "\n\n".join(parts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output_flags(parser, "lifetime")
    options = parser.parse_args()
    loads = {"open chat": measure(open_chat()), "batch job": measure(batch_job())}
    publish("lifetime", as_text(loads), options, loads=loads)


if __name__ == "__main__":
    main()
