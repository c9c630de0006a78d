"""How evenly a run serves tenants while they have a backlog."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import numpy.typing as npt

from sagellm.core import StepInput
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.metrics.fairness import jains_index

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""What a computed prompt token and an output token count, as the pass `fair-share` charges them."""

WINDOW_S = 10.0


class TenantShares:
    """Measures Jain's index over windows of WINDOW_S seconds of virtual time.

    x = weighted tokens computed for a tenant ÷ its weight, over the tenants with a waiting request at each
    step of the window; windows with fewer than two of them do not count. A step costs O(running + waiting).
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._service: dict[int, float] = {}  # by tenant code, like `_weights`
        self._weights: dict[int, float] = {}
        self._backlogged: set[int] | None = None
        self._window = 0
        self._indices: list[float] = []

    def on_step(self, step: StepInput, now_ns: int, last_ns: int) -> None:
        """Count a step that begins now, or several in a row of which the last begins at `last_ns`."""
        self._move_to(now_ns)
        seats = self._core.kv.seats
        columns = seats.schedule_columns.arrays
        tenants, weights = columns["tenant"][step.seats], columns["weight"][step.seats]
        is_decode = step.starts >= seats.num_prompt[step.seats]
        cost: npt.NDArray[np.float64] = PROMPT_COST * (step.num_new * ~is_decode) + OUTPUT_COST * (
            step.is_sampled
        )
        codes, first, place = np.unique(tenants, return_index=True, return_inverse=True)
        for code, row, service in zip(
            codes.tolist(), first.tolist(), np.bincount(place, cost).tolist(), strict=True
        ):
            self._service[code] = self._service.get(code, 0.0) + service
            self._weights[code] = float(weights[row])
        waiting = set(self._core.scheduler.waiting_rows().tenant.tolist())
        self._backlogged = waiting if self._backlogged is None else self._backlogged & waiting
        if step.num_steps > 1:
            assert not waiting, "steps are alike only while nothing waits"
            self._move_to(last_ns)
            self._backlogged = waiting

    def _move_to(self, now_ns: int) -> None:
        window = int(now_ns / (1e9 * WINDOW_S))
        if window != self._window:
            self._close()
            self._window = window

    def index(self) -> float | None:
        """Return the mean over the windows so far; None if there were none."""
        self._close()
        return fmean(self._indices) if self._indices else None

    def _close(self) -> None:
        if self._backlogged is not None and len(self._backlogged) > 1:
            self._indices.append(
                jains_index(
                    self._service.get(code, 0.0) / self._weights.get(code, 1.0) for code in self._backlogged
                )
            )
        self._service.clear()
        self._backlogged = None
