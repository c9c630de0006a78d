"""How well lifetime predictors say the output lengths of a trace, beside what needs no predictor."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from sagellm.core import ConfigError, LifetimePredictorProtocol, TraceRequest
from sagellm.core.lifetime_scores import rank_correlation
from sagellm.engines.progress import Advance
from sagellm.lab.simulation.predictions import NO_LIMIT, Question, predictions, questions

SPLIT = 0.7
"""Share of a trace, by arrival, that predictors may learn from before they are scored."""

_MIN_REQUESTS = 20
_TRUSTED = 0.8
_NUM_PEERS = 64
_TENTHS = 10
_NONE_ENDED = (
    "no request among those to score, the last 30 % by arrival, ended before its limit of tokens, so the "
    "length of none is known; take a trace in which some did"
)


@dataclass(frozen=True, kw_only=True)
class PredictorFigures:
    """Errors of predictions at admission, of requests that ended by themselves; METRICS name them alike.

    `calibration` has a row for each tenth of the predictions, the least sure first: mean confidence, how
    often they were ordered rightly against the 64 requests before and after, and their number.
    """

    name: str
    num_scored: int
    mae_tokens: float
    within_10_percent: float
    within_10_percent_or_5_tokens: float
    rank_correlation: float | None
    coverage: float | None = None  # of the 80 % interval
    mean_confidence: float | None = None
    trusted_share: float | None = None  # with a confidence of at least 0.8
    calibration: list[tuple[float, float, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was predicted of one request when it arrived."""

    length: float
    actual_length: int
    low: float | None = None
    high: float | None = None
    confidence: float | None = None


def split_of(requests: Sequence[TraceRequest]) -> int:
    """Return the index of the first request that is scored. Raises ConfigError if there are too few."""
    if len(requests) < _MIN_REQUESTS:
        raise ConfigError(
            f"the trace has {len(requests)} requests; at least {_MIN_REQUESTS} are needed to score predictors"
        )
    return int(SPLIT * len(requests))


def score_predictor(
    name: str,
    predictor: LifetimePredictorProtocol,
    requests: Sequence[TraceRequest],
    advance: Advance = lambda amount: None,
) -> PredictorFigures:
    """Ask a predictor about a whole trace, sorted by arrival, and score the last 30 %.

    It learns from each output before the next request arrives that comes after its end; from the future
    nothing.
    """
    cut, answers = split_of(requests), []
    for number, (question, found) in enumerate(predictions(predictor, requests)):
        if number >= cut and question.actual_length < question.request.max_length:
            answers.append(
                Answer(
                    length=found.remaining_length,
                    actual_length=question.actual_length,
                    low=found.low,
                    high=found.high,
                    confidence=found.confidence,
                )
            )
        advance(1)
    return figures_of(name, answers)


def controls(requests: Sequence[TraceRequest]) -> list[PredictorFigures]:
    """Score what needs no predictor.

    The median of the first 70 %, alone and by quarters of octaves of the prompt's length, and the best
    constant in hindsight: the median of what is scored. Raises ConfigError if nothing can be scored.
    """
    cut = split_of(requests)
    scored = [one for one in requests[cut:] if one.num_output_tokens < (one.max_tokens or NO_LIMIT)]
    if not scored:
        raise ConfigError(_NONE_ENDED)
    lengths = [one.num_output_tokens for one in requests]
    by_prompt: defaultdict[int, list[int]] = defaultdict(list)
    for one in requests[:cut]:
        by_prompt[_quarter(one.num_prompt_tokens)].append(one.num_output_tokens)
    medians = {bucket: median(found) for bucket, found in by_prompt.items()}
    overall = median(lengths[:cut])
    best = median(one.num_output_tokens for one in scored)
    guesses: dict[str, Callable[[TraceRequest], float]] = {
        "constant median": lambda one: overall,
        "median by prompt length": lambda one: medians.get(_quarter(one.num_prompt_tokens), overall),
        "best constant in hindsight": lambda one: best,
    }
    return [
        figures_of(name, [Answer(length=guess(one), actual_length=one.num_output_tokens) for one in scored])
        for name, guess in guesses.items()
    ]


def examples_of(requests: Sequence[TraceRequest], *, whole: bool = False) -> list[Question]:
    """Return what a predictor is asked about the first 70 % of a trace, or all of it, to be trained on."""
    cut = len(requests) if whole else split_of(requests)
    found = [event for event in questions(requests[:cut]) if isinstance(event, Question)]
    return [each for each in found if each.actual_length < each.request.max_length]


def figures_of(name: str, answers: Sequence[Answer]) -> PredictorFigures:
    """Score predictions. Raises ConfigError if there are none."""
    if not answers:
        raise ConfigError(_NONE_ENDED)
    errors = [(abs(each.length - each.actual_length), each.actual_length) for each in answers]
    intervals = [each for each in answers if each.low is not None and each.high is not None]
    confidences = [each.confidence for each in answers if each.confidence is not None]
    return PredictorFigures(
        name=name,
        num_scored=len(answers),
        mae_tokens=fmean(error for error, _ in errors),
        within_10_percent=fmean(10 * error <= length for error, length in errors),
        within_10_percent_or_5_tokens=fmean(10 * error <= length or error <= 5 for error, length in errors),
        rank_correlation=rank_correlation(
            [each.length for each in answers], [each.actual_length for each in answers]
        ),
        coverage=fmean((each.low or 0.0) <= each.actual_length <= (each.high or 0.0) for each in intervals)
        if intervals
        else None,
        mean_confidence=fmean(confidences) if confidences else None,
        trusted_share=fmean(each >= _TRUSTED for each in confidences) if confidences else None,
        calibration=_calibration(answers) if confidences else [],
    )


def _calibration(answers: Sequence[Answer]) -> list[tuple[float, float, int]]:
    """Return claimed and true shares of right orders, by tenths of the predictions, the least sure first.

    One prediction alone has no order.
    """
    if len(answers) < 2:
        return []
    claimed = [each.confidence or 0.0 for each in answers]
    edges = sorted(claimed)
    edges = [edges[len(edges) * tenth // _TENTHS] for tenth in range(1, _TENTHS)]
    found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for index, each in enumerate(answers):
        around = range(max(0, index - _NUM_PEERS), min(len(answers), index + _NUM_PEERS + 1))
        right = [_order(each, answers[other]) for other in around if other != index]
        found[bisect_left(edges, claimed[index])].append((claimed[index], fmean(right)))
    return [
        (fmean(one for one, _ in pairs), fmean(one for _, one in pairs), len(pairs))
        for _, pairs in sorted(found.items())
    ]


def _order(one: Answer, other: Answer) -> float:
    """Return 1 if the two were predicted in the right order, 0 if not, and a half if either is a draw."""
    said = (one.length > other.length) - (one.length < other.length)
    true = (one.actual_length > other.actual_length) - (one.actual_length < other.actual_length)
    return (1 + said * true) / 2


def _quarter(num_tokens: int) -> int:
    shift = max(0, num_tokens.bit_length() - 3)
    return 4 * shift + (num_tokens >> shift)
