"""How evenly service is shared, and how full batches are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sagellm.core.errors import InvalidInputError


def jains_index(shares: Iterable[float]) -> float:
    """Jain's index = (Σx)² ÷ (n · Σx²), from 1 ÷ n (one has all) to 1 (all have the same).

    x = service received ÷ service entitled (weighted tokens) of each tenant with a backlog in a
    window; state which service and window. 1 if all are zero or there is no tenant: none is ahead. Raises
    InvalidInputError for a negative share. After Jain, Chiu and Hawe (1984).
    """
    values = list(shares)
    if any(not 0 <= value < float("inf") for value in values):
        raise InvalidInputError(f"the shares are {values}; each must be finite and at least 0")
    largest = max(values, default=0.0)
    if not largest:
        return 1.0
    scaled = [value / largest for value in values]  # squares of tiny shares would vanish
    return sum(scaled) ** 2 / (len(scaled) * sum(value * value for value in scaled))


@dataclass(frozen=True, kw_only=True)
class BatchStep:
    """One step in which a waiting request could have been admitted; all counts are tokens."""

    num_useful_tokens: int
    token_budget: int
    num_admissible_tokens: int  # what the free blocks and free seats would admit


def batching_efficiency(steps: Iterable[BatchStep]) -> float:
    """Batching efficiency = useful tokens ÷ min(token budget, admissible tokens), mean over steps.

    Steps in which nothing could have been admitted are left out; 0 if none is left.
    """
    shares = []
    for step in steps:
        possible = min(step.token_budget, step.num_admissible_tokens)
        if possible > 0:
            shares.append(step.num_useful_tokens / possible)
    return sum(shares) / len(shares) if shares else 0.0
