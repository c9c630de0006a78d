"""What the scheduler's rows say of a sequence as long as it lives, as columns; and a row as an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sagellm.core import ScheduleRequest, hash_of
from sagellm.core.protocols.scheduler_ir import SCHEDULE_COLUMNS

if TYPE_CHECKING:
    from sagellm.engines.engine_core.sequence import Sequence

_CHANGING = {
    "num_tokens",
    "num_computed_tokens",
    "num_blocks",
    "last_scheduled_step",
    "predicted_remaining_tokens",
}
_FIXED = {name: dtype for name, dtype in SCHEDULE_COLUMNS.items() if name not in _CHANGING}
_FIXED["predicted_tokens"] = "f4"  # of the whole output, when it arrived; NaN if unknown


class RemainingColumns(dict[str, npt.NDArray[Any]]):
    """Columns in which the predicted remaining tokens are computed if somebody reads them."""

    def __missing__(self, name: str) -> npt.NDArray[Any]:
        if name != "predicted_remaining_tokens":
            raise KeyError(name)
        num_generated = self["num_tokens"] - self["num_prompt_tokens"]
        remaining: npt.NDArray[Any] = np.maximum(self["predicted_tokens"] - num_generated, 1)
        return remaining.astype(np.float32)


class ScheduleColumns:
    """Everything but the counts, which change: one row per seat, or per waiting sequence."""

    def __init__(self, num_rows: int = 0) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(num_rows, dtype) for name, dtype in _FIXED.items()
        }

    def put(self, row: int, sequence: Sequence) -> None:
        """Fill a row."""
        request, arrays = sequence.request, self.arrays
        tenant, predicted = request.tenant, sequence.predicted_tokens
        arrays["priority"][row] = request.priority
        arrays["arrived_time"][row] = request.arrival_ns / 1e9
        arrays["num_prompt_tokens"][row] = len(request.token_ids)
        arrays["predicted_tokens"][row] = np.nan if predicted is None else predicted
        arrays["confidence"][row] = sequence.confidence or 0.0
        arrays["max_tokens"][row] = request.max_tokens
        arrays["deadline"][row] = np.inf if request.deadline_ns is None else request.deadline_ns / 1e9
        arrays["tenant"][row] = tenant.code
        arrays["weight"][row] = tenant.weight
        arrays["is_trusted"][row] = tenant.is_trusted
        arrays["key"][row] = hash_of(sequence.sequence_id)

    def grow(self, num_rows: int) -> None:
        """Append empty rows."""
        for name, array in self.arrays.items():
            self.arrays[name] = np.concatenate((array, np.zeros(num_rows - len(array), array.dtype)))


def schedule_request(sequence: Sequence, *, num_tokens: int, **counts: int) -> ScheduleRequest:
    """Return the row of a sequence as an object."""
    request, remaining = sequence.request, sequence.predicted_tokens
    if remaining is not None:
        remaining = max(remaining - (num_tokens - len(request.token_ids)), 1.0)
    return ScheduleRequest(
        request_id=sequence.sequence_id,
        token_ids=request.token_ids,
        max_tokens=request.max_tokens,
        priority=request.priority,
        arrived_time=request.arrival_ns / 1e9,
        num_tokens=num_tokens,
        predicted_remaining_tokens=remaining,
        confidence=sequence.confidence,
        deadline=None if request.deadline_ns is None else request.deadline_ns / 1e9,
        namespace=request.namespace,
        tenant=request.tenant,
        **counts,
    )
