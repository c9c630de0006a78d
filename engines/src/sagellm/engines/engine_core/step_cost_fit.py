"""The cost of a step, fitted to measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from sagellm.core import StepCost, StepInput, StepWork

FIRST_STEPS = 8
"""Steps before the first fit."""

REFIT_STEPS = 32
"""Steps between two fits."""

MEMORY_STEPS = 1024
"""A step counts half as much once 0.7 times as many have followed."""

_OUTLIER = 0.25
"""Relative error beyond which a step counts less, as a machine is sometimes busy with other work."""

_NUM_COEFFICIENTS = 1 + len(StepWork._fields)

_SCALE_WEIGHT, _SCALE_STEPS = 0.2, 8
"""The weight of a new step in the scale, and the last steps whose median it starts with after a fit."""

_NUM_PREFILLS = 1 + StepWork._fields.index("num_prefills")
"""The column of prefills in a measured step; the first is the base's."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


def work_of(step: StepInput) -> StepWork:
    """Return what a step computes. A decode with drafts is not a prefill."""
    work = StepWork.of(step.starts, step.num_new)
    if step.drafts is None:
        return work
    return work._replace(num_prefills=int(np.count_nonzero(step.num_new - step.drafts.counts > 1)))


def decode_works(starts: Ints, num_steps: int) -> Iterator[StepWork]:
    """Yield the work of decodes after their first `starts` tokens, and of those after them: (rows,)."""
    num_rows = len(starts)
    num_kv_tokens = int(starts.sum(dtype=np.int64)) + num_rows
    num_pairs = num_kv_tokens - -(-num_rows // 2)  # each token with those before it, and half with itself
    for more in range(0, num_steps * num_rows, num_rows):
        yield StepWork(num_rows, num_rows, num_kv_tokens + more, num_pairs + more)


class StepCostFit:
    """Fits StepCost to steps as they come, with relative errors and less weight for old ones and outliers.

    A step costs 0.3 µs, and every REFIT_STEPS about 0.3 ms more.
    """

    def __init__(self) -> None:
        self._new: list[tuple[float, ...]] = []
        self._products: Floats = np.zeros((_NUM_COEFFICIENTS, _NUM_COEFFICIENTS))  # of amounts ÷ duration
        self._sums: Floats = np.zeros(_NUM_COEFFICIENTS)
        self._wait = FIRST_STEPS
        self._fit: StepCost | None = None
        self._scale = 1.0  # of the fit, by the last steps with prompts
        self._cost: StepCost | None = None

    @property
    def cost(self) -> StepCost | None:
        """The fit, scaled to what the last steps with prompts took; None before the first fit.

        A fit covers many steps, so it lags behind as a prompt's context grows; the scale follows within a
        few.
        """
        return self._cost

    def add(self, work: StepWork, took_ns: int) -> None:
        """Include a measured step."""
        if took_ns > 0 and work.num_tokens:
            self._new.append((1.0, *work, took_ns))
            if len(self._new) >= self._wait:
                self._refit()
            elif self._fit is not None and work.num_prefills:
                ratio = took_ns / max(self._fit.predict_ns(work), 1.0)
                self._scale += _SCALE_WEIGHT * (min(max(ratio, 0.5), 2.0) - self._scale)
                self._cost = self._fit.scaled(self._scale)

    def _refit(self) -> None:
        steps = np.array(self._new)
        self._new.clear()
        self._wait = REFIT_STEPS
        rows = steps[:, :-1] / steps[:, -1:]
        weights = np.ones(len(rows))
        if self._fit is not None:
            errors = np.abs(rows @ _coefficients(self._fit) - 1)
            weights = np.minimum(1.0, _OUTLIER / np.maximum(errors, 1e-9))
        decay = 0.5 ** (len(rows) / (0.7 * MEMORY_STEPS))
        self._products = decay * self._products + (rows * weights[:, None]).T @ rows
        self._sums = decay * self._sums + weights @ rows
        self._fit = _cost(_non_negative(self._products, self._sums))
        predicted = rows[steps[:, _NUM_PREFILLS] > 0][-_SCALE_STEPS:] @ _coefficients(self._fit)
        self._scale = float(np.clip(1 / np.median(predicted), 0.5, 2.0)) if len(predicted) else 1.0
        self._cost = self._fit.scaled(self._scale)


def fit_step_cost(steps: Iterable[tuple[StepWork, int]]) -> StepCost:
    """Fit recorded steps: amounts, nanoseconds. Raises ValueError without steps.

    A step weighs as its duration, so that neither the many short steps nor the few long ones decide what all
    cost. Outliers count less.
    """
    table = np.array([(1.0, *work, took_ns) for work, took_ns in steps])
    if not len(table):
        raise ValueError("there are no steps to fit")
    amounts, took_ns = table[:, :-1], table[:, -1]
    predicted_ns = took_ns
    for _ in range(20):
        errors = np.abs(took_ns / predicted_ns - 1)
        weights = np.minimum(1.0, 0.1 / np.maximum(errors, 1e-9)) / predicted_ns
        weighted = (amounts * weights[:, None]).T
        found = _non_negative(weighted @ amounts, weighted @ took_ns)
        predicted_ns = np.maximum(amounts @ found, 1.0)
    return _cost(found)


def _non_negative(products: Floats, sums: Floats) -> Floats:
    """Solve the normal equations for coefficients of at least 0, dropping the most negative one each time."""
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    scaled, wanted = products / np.outer(scale, scale), sums / scale
    scaled[np.diag_indices(_NUM_COEFFICIENTS)] += 1e-6  # amounts that always come together share their cost
    kept = np.flatnonzero(np.diag(products) > 0)
    while len(kept):
        found = np.linalg.solve(scaled[np.ix_(kept, kept)], wanted[kept])
        if found.min() >= 0:
            result = np.zeros(_NUM_COEFFICIENTS)
            result[kept] = found / scale[kept]
            return result
        kept = np.delete(kept, found.argmin())
    return np.zeros(_NUM_COEFFICIENTS)


def _coefficients(cost: StepCost) -> Floats:
    return np.array(
        [cost.base_ns, cost.token_ns, cost.seq_ns, cost.kv_token_ns, cost.pair_ns, cost.prefill_ns]
    )


def _cost(coefficients: Floats) -> StepCost:
    base, token, seq, kv_token, pair, prefill = map(float, coefficients)
    return StepCost(
        base_ns=base,
        token_ns=token,
        seq_ns=seq,
        kv_token_ns=kv_token,
        pair_ns=pair,
        prefill_ns=prefill,
    )
