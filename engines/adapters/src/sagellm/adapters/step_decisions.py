"""What another engine is to do with the decisions of our passes in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core import ScheduleIR
from sagellm.core.protocols.scheduler_ir import MAX_CAP, Part

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepDecisions:
    """The decisions about one step, in the terms of an engine that plans the rest itself.

    Positions are those of the rows that the passes saw. A cap of 0 has a running request sit the step out.
    """

    admission: Places | None  # waiting, who may be admitted, in order; None: as they wait
    preempted: tuple[int, ...]  # running, at once
    preemption: Places | None  # running, the last of which is preempted first; None: as they run
    pending_caps: Mapping[int, int]
    running_caps: Mapping[int, int]
    max_num_batched_tokens: int
    max_num_seqs: int


def decisions_of(before: ScheduleIR, after: ScheduleIR) -> StepDecisions | None:
    """Return what passes decided about a step; None if that is nothing.

    Marks to swap are not among it: whether KV is kept is up to the engine.
    """
    if all(each.kind == "swap" for each in after.decisions):
        return None
    return StepDecisions(
        admission=_admission(before, after),
        preempted=tuple(after.preempted),
        preemption=after.preemption if _is_ordered(after, "running") else None,
        pending_caps=_caps(after, "pending"),
        running_caps=_running_caps(before, after),
        max_num_batched_tokens=after.max_num_batched_tokens,
        max_num_seqs=after.max_num_seqs,
    )


def _is_ordered(ir: ScheduleIR, part: Part) -> bool:
    return any((each.kind, each.target) == ("order", part) for each in ir.decisions)


def _admission(before: ScheduleIR, after: ScheduleIR) -> Places | None:
    """Return who may be admitted, in order, without those for whom lowered memory does not suffice."""
    is_lowered = after.available_memory < before.available_memory
    # Whoever is preempted comes back to the front of the queue, and must not be admitted in the same step.
    if not (_is_ordered(after, "pending") or after.deferred or after.preempted or is_lowered):
        return None
    order = after.admission
    if after.deferred:
        order = order[~np.isin(order, list(after.deferred))]
    if is_lowered:
        num_blocks = -(-after.pending.num_tokens[order] // after.block_size)
        order = order[np.cumsum(num_blocks) <= after.available_memory]
    return order


def _caps(ir: ScheduleIR, part: Part) -> dict[int, int]:
    if not any(each.target == part and each.kind in ("cap", "yield") for each in ir.decisions):
        return {}
    caps = ir.caps(part)
    return {row: int(caps[row]) for row in np.flatnonzero(caps < MAX_CAP).tolist()}


def _running_caps(before: ScheduleIR, after: ScheduleIR) -> dict[int, int]:
    """Return the caps, with those that leave a token of a lowered budget to each decode.

    Other engines serve running requests in their order, so that a prompt before decodes would take what the
    pass has left for these.
    """
    caps = _caps(after, "running")
    running = after.running
    if after.max_num_batched_tokens == before.max_num_batched_tokens or not running.num_prefills:
        return caps
    missing = running.num_missing
    is_prompt = missing > 1
    left = after.max_num_batched_tokens - int(np.count_nonzero(missing == 1))
    prompts = [row for row in np.flatnonzero(is_prompt).tolist() if row not in after.preempted]
    for place, row in enumerate(prompts):
        later = len(prompts) - place - 1  # each gets a token, too
        num_tokens = min(int(missing[row]), caps.get(row, MAX_CAP), max(left - later, 0))
        caps[row] = num_tokens
        left -= num_tokens
    return caps
