"""How well output lengths are predicted at admission: `python benchmarks/lifetime.py [TRACE ...]`, 5 minutes.

Each trace is split by time: what is learnt beforehand is learnt from the first 70 % of the requests, and
the last 30 % are scored. A request is predicted from what was known when it arrived, and learnt from when it
has ended. Beside the predictors three controls that need none: the median of the first 70 %, the median by
prompt length, and the best constant in hindsight. Without a TRACE these are scored:

- azure_conv: conversations of 2023, of which only lengths are known
- embedded_chat: open chat with the embedded model, recorded with its text (`record_chat.py`)
- embedded_templates: five prompt templates, whose answers vary with what is filled in

The kept figures have two more: `mooncake_conversation.jsonl` (conversation_trace.jsonl of
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0), of which it is known which
prompts begin alike, and `AzureLLMInferenceTrace_code.csv` of https://github.com/Azure/AzurePublicDataset
(CC-BY), of which nothing that is known says anything.

Then what a prediction takes, alone and in a batch of 256 running sequences, and how long it takes to recover
when outputs become three times as long at once (--plot draws it).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from common import output_flags, publish, spread

from sagellm.core import (
    LifetimePredictorProtocol,
    PluginRegistry,
    PredictionRequest,
    ProviderSpec,
    TraceRequest,
)
from sagellm.core.protocols.prefix_cache import PrefixAnswers
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.predictor import table_of
from sagellm.lab.simulation.predictions import predictions
from sagellm.lab.simulation.predictor_scores import controls, examples_of, score_predictor
from sagellm.lab.traces import read_trace

TRACES = Path(__file__).parent / "traces"
DEFAULT = ("azure_conv.csv.xz", "embedded_chat.jsonl.xz", "embedded_templates.jsonl.xz")
PREDICTORS = ("statistical", "ranker", "online", "lstm", "transformer")
TRAINED = ("lstm", "transformer")
BATCH = 256
SHIFT, WINDOW = 3, 50  # times as long, and requests over which an error is averaged
RECOVERED = 1.25  # times the error in the end


def make(name: str, **options: Any) -> LifetimePredictorProtocol:
    """Make a new predictor."""
    made: LifetimePredictorProtocol = PluginRegistry.load().make(
        "lifetime_predictor", ProviderSpec(name, options)
    )
    return made


def trained(name: str, requests: Sequence[TraceRequest], path: Path) -> LifetimePredictorProtocol:
    """Train a predictor on the first 70 % of a trace."""
    examples = [(each.request, each.actual_length) for each in examples_of(requests)]
    target: Any = PluginRegistry.load().resolve("lifetime_predictor", name)
    target.train(examples, path)
    return make(name, weights=str(path))


def name_of(path: Path) -> str:
    """Return a trace's name without its suffixes."""
    return path.name.split(".")[0]


def score(path: Path) -> list[dict[str, Any]]:
    """Score the controls and every predictor on one trace."""
    requests = sorted(read_trace(path), key=lambda one: one.arrival_s)
    found = controls(requests)
    with (
        progress_bar(name_of(path), total=len(PREDICTORS) * len(requests), unit="requests") as advance,
        TemporaryDirectory() as folder,
    ):
        for name in PREDICTORS:
            weights = Path(folder) / name
            predictor = trained(name, requests, weights) if name in TRAINED else make(name)
            found.append(score_predictor(name, predictor, requests, advance))
    print(f"{path.name}: {len(requests):,} requests\n{table_of(found)}\n", flush=True)
    return [asdict(each) for each in found]


def asked(number: int, current_length: int = 0) -> PredictionRequest:
    """Return a question of 100 words of which two prefixes are known."""
    answers = (
        PrefixAnswers(40, 5, (3, 4, 5, 6, 7), 0),
        PrefixAnswers(20, 50, (30, 40, 50, 60, 70, 40, 30, 20), 0),
    )
    return PredictionRequest(
        sequence_id=str(number),
        token_ids=range(number, number + 100),
        current_length=current_length,
        max_length=4096,
        answers=answers,
    )


def costs_of(name: str, weights: Path) -> dict[str, Any]:
    """Return the microseconds of a prediction alone, of one of a batch, and of an update."""
    predictor = make(name, weights=str(weights)) if name in TRAINED else make(name)
    for number in range(500):
        predictor.predict(asked(number))
        predictor.update(sequence_id=str(number), actual_length=number * 37 % 400, actual_time=1.0)
    alone = [
        _us(lambda number=number: predictor.predict(asked(number))) for number in range(1000, 1000 + BATCH)
    ]  # type: ignore[misc]
    running = [asked(1000 + number, 5) for number in range(BATCH)]
    batch = [_us(lambda: predictor.predict_all(running)) / BATCH for _ in range(100)]
    update = [
        _us(
            lambda number=number: predictor.update(sequence_id=str(number), actual_length=50, actual_time=1.0)
        )  # type: ignore[misc]
        for number in range(1000, 1000 + BATCH)
    ]
    return {"alone_us": spread(alone), "of_a_batch_us": spread(batch), "update_us": spread(update)}


def _us(call: Any) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def shifted() -> list[TraceRequest]:
    """Return the templates' requests; in the second half, answers are three times as long."""
    requests = sorted(read_trace(TRACES / "embedded_templates.jsonl.xz"), key=lambda one: one.arrival_s)
    half = len(requests) // 2
    return [
        *requests[:half],
        *(
            replace(one, num_output_tokens=SHIFT * one.num_output_tokens, max_tokens=None)
            for one in requests[half:]
        ),
    ]


def recovery(name: str, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """Return the mean error by request around a shift, and after how many requests it is as in the end."""
    predictor, half = make(name), len(requests) // 2
    errors = [
        abs(found.remaining_length - question.actual_length)
        for question, found in predictions(predictor, requests)
    ]
    curve = list(_means(errors))
    end = fmean(errors[-4 * WINDOW :])
    recovered = next(
        (index - half for index in range(half + WINDOW, len(curve)) if curve[index] <= RECOVERED * end), None
    )
    return {
        "before": fmean(errors[half - 4 * WINDOW : half]),
        "worst": max(curve[half:]),
        "end": end,
        "recovered_after": recovered,
        "curve": [round(each, 2) for each in curve[half - 200 :]],
    }


def _means(errors: Sequence[float]) -> Iterator[float]:
    for index in range(len(errors)):
        yield fmean(errors[max(0, index - WINDOW + 1) : index + 1])


def plot(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Draw the errors around the shift."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained", dpi=150)
    axes = figure.subplots()
    for name, each in found.items():
        axes.plot(range(-200, len(each["curve"]) - 200, 4), each["curve"][::4], label=name)
    axes.axvline(0, color="gray", linestyle=":")
    axes.set(
        xlabel=f"requests since answers are {SHIFT} times as long",
        ylabel=f"mean error of {WINDOW} (tokens)",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(path)


def as_text(found: dict[str, Any]) -> str:
    """Show costs and recovery; the scores are printed as they come."""
    lines = [
        f"{name}: a prediction takes {_of(one['alone_us'])} us alone, {_of(one['of_a_batch_us'])} of a batch "
        f"of {BATCH}; an update {_of(one['update_us'])} (p99)"
        for name, one in found["costs"].items()
    ]
    lines += [
        f"{name}: answers {SHIFT} times as long: an error of {one['before']:.1f} tokens before, "
        f"{one['worst']:.1f} at worst, {one['end']:.1f} in the end, reached after {one['recovered_after']}"
        for name, one in found["shift"].items()
    ]
    return "\n".join(lines)


def _of(times: dict[str, Any]) -> str:
    return f"{times['median']:.3g} ({times['p99']:.3g})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="*", help="besides those in benchmarks/traces")
    parser.add_argument("--plot", type=Path, help="draw the recovery from a shift")
    output_flags(parser, "lifetime")
    options = parser.parse_args()
    loads = {name_of(path): score(path) for path in [*(TRACES / name for name in DEFAULT), *options.trace]}
    requests = shifted()
    with TemporaryDirectory() as folder:
        weights = {name: Path(folder) / name for name in TRAINED}
        for name, path in weights.items():
            trained(name, requests[:1000], path)
        costs = {name: costs_of(name, weights.get(name, Path())) for name in PREDICTORS}
    shift = {name: recovery(name, requests) for name in ("statistical", "ranker", "online")}
    if options.plot is not None:
        plot(options.plot, shift)
    found = {"loads": loads, "costs": costs, "shift": shift}
    publish("lifetime", as_text(found), options, **found)


if __name__ == "__main__":
    main()
