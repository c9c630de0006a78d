"""How accurate predictions of remaining output tokens are, on requests the predictor never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from sagellm.core.errors import InvalidInputError


def _errors(predicted: Sequence[float], actual: Sequence[float]) -> list[float]:
    if len(predicted) != len(actual) or not actual:
        raise InvalidInputError(
            f"{len(predicted)} predictions for {len(actual)} lengths; they must be as many, and at least one"
        )
    return [abs(guess - truth) for guess, truth in zip(predicted, actual, strict=True)]


def lifetime_mae(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """Lifetime MAE = mean of |predicted − actual| remaining output tokens, in tokens.

    Report it beside `median_mae` of the same lengths.
    """
    errors = _errors(predicted, actual)
    return sum(errors) / len(errors)


def median_mae(actual: Sequence[float]) -> float:
    """Return the MAE of the best constant predictor = mean of |median − actual|, in tokens."""
    return lifetime_mae([median(actual)] * len(actual) if actual else [], actual)


def within_10_percent(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """Within 10 % = predictions with |predicted − actual| ≤ 10 % of actual ÷ predictions."""
    return _share_within(predicted, actual, min_tokens=0)


def within_10_percent_or_5_tokens(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """Within max(10 %, 5 tokens) = predictions with error ≤ max(10 % of actual, 5 tokens) ÷ predictions."""
    return _share_within(predicted, actual, min_tokens=5)


def _share_within(predicted: Sequence[float], actual: Sequence[float], *, min_tokens: int) -> float:
    errors = _errors(predicted, actual)
    # 10 · error ≤ truth is exact for whole tokens, unlike error ≤ 0.1 · truth
    pairs = zip(errors, actual, strict=True)
    return sum(error <= min_tokens or 10 * error <= truth for error, truth in pairs) / len(errors)
