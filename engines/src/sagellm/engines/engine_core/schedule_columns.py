"""What the scheduler's rows say of a sequence as long as it lives, as columns; and a row as an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sagellm.core import ScheduleRequest
from sagellm.core.protocols.scheduler_ir import COUNT_COLUMNS, SCHEDULE_COLUMNS

if TYPE_CHECKING:
    from sagellm.engines.engine_core.sequence import Sequence


class ScheduleColumns:
    """Everything but the counts, which change: one row per seat, or per waiting sequence."""

    def __init__(self, num_rows: int = 0) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(num_rows, dtype)
            for name, dtype in SCHEDULE_COLUMNS.items()
            if name not in COUNT_COLUMNS
        }

    def put(self, row: int, sequence: Sequence) -> None:
        """Fill a row."""
        request, arrays = sequence.request, self.arrays
        tenant, remaining = request.tenant, sequence.predicted_remaining_tokens
        arrays["priority"][row] = request.priority
        arrays["arrived_time"][row] = request.arrival_ns / 1e9
        arrays["num_prompt_tokens"][row] = len(request.token_ids)
        arrays["predicted_remaining_tokens"][row] = np.nan if remaining is None else remaining
        arrays["confidence"][row] = sequence.confidence or 0.0
        arrays["max_tokens"][row] = request.max_tokens
        arrays["deadline"][row] = np.inf if request.deadline_ns is None else request.deadline_ns / 1e9
        arrays["tenant"][row] = tenant.code
        arrays["weight"][row] = tenant.weight
        arrays["is_trusted"][row] = tenant.is_trusted
        arrays["key"][row] = sequence.key

    def grow(self, num_rows: int) -> None:
        """Append empty rows."""
        for name, array in self.arrays.items():
            self.arrays[name] = np.concatenate((array, np.zeros(num_rows - len(array), array.dtype)))


def schedule_request(sequence: Sequence, **counts: int) -> ScheduleRequest:
    """Return the row of a sequence as an object."""
    request = sequence.request
    return ScheduleRequest(
        request_id=sequence.sequence_id,
        token_ids=request.token_ids,
        max_tokens=request.max_tokens,
        priority=request.priority,
        arrived_time=request.arrival_ns / 1e9,
        predicted_remaining_tokens=sequence.predicted_remaining_tokens,
        confidence=sequence.confidence,
        deadline=None if request.deadline_ns is None else request.deadline_ns / 1e9,
        namespace=request.namespace,
        tenant=request.tenant,
        **counts,
    )
