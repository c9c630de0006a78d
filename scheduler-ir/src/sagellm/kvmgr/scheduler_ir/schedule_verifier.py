"""Checks what a scheduler pass decided."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import EngineError
from sagellm.core.protocols.scheduler_ir import (
    LIMITS,
    MAX_CAP,
    WAYS,
    Decision,
    ScheduleIR,
)


class BrokenRuleError(EngineError):
    """A scheduler pass broke a rule, and how."""


class _BrokenRule(Exception):
    """Says which rule a pass broke, and how."""

    def __init__(self, rule: str, how: str) -> None:
        super().__init__(f"broke the rule {rule!r}: {how}")


def verify_rewrite(name: str, before: ScheduleIR, after: object) -> ScheduleIR:
    """Return `before` with the new decisions of `after`, signed by the pass called `name`.

    Every scheduler runs it after every pass. Raises BrokenRuleError with the names of the pass and of
    the rule that it broke. O(rows decided on).
    """
    if after is before:
        return before
    try:
        if not isinstance(after, ScheduleIR):
            raise _BrokenRule("a pass returns a ScheduleIR", f"it returned {type(after).__name__}")
        new = _new_decisions(before, after)
        for decision in new:
            _check(decision, before)
        _check_unchanged(before, after, new)
    except _BrokenRule as broken:
        raise BrokenRuleError(f"scheduler pass {name!r} {broken}") from None
    if not new:
        return before
    signed = tuple(Decision(one.kind, one.target, one.rows, one.value, name) for one in new)
    lowered: dict[str, Any] = {each.target: each.value for each in new if each.kind == "lower"}
    return before.updated(decisions=before.decisions + signed, **lowered)


def _new_decisions(before: ScheduleIR, after: ScheduleIR) -> tuple[Decision, ...]:
    if not isinstance(after.decisions, tuple):
        raise _BrokenRule("decisions are a tuple", f"it returned {type(after.decisions).__name__}")
    num_old = len(before.decisions)
    kept, new = after.decisions[:num_old], after.decisions[num_old:]
    if [*map(id, kept)] != [*map(id, before.decisions)]:
        raise _BrokenRule("what earlier passes decided stands", "it dropped or replaced a decision")
    return new


def _check_unchanged(before: ScheduleIR, after: ScheduleIR, new: tuple[Decision, ...]) -> None:
    """Check that nothing but the decisions has changed, and the limits only as `lower` says."""
    for name in ("pending", "running", "probe", "state", "cost"):
        if getattr(after, name) is not getattr(before, name):
            raise _BrokenRule("a pass changes nothing but decisions", f"it replaced {name}")
    lowered = {str(each.target): each.value for each in new if each.kind == "lower"}
    for name in (*LIMITS, "block_size", "step", "now", "step_target_ms", "epoch"):
        expected, found = lowered.get(name, getattr(before, name)), getattr(after, name)
        if found != expected:
            hint = f"ir.lower({name}=...)" if name in LIMITS else "nothing"
            raise _BrokenRule(
                "a pass changes nothing but decisions",
                f"it set {name} to {found} in place of {expected}; what may change it is {hint}",
            )


def _check(decision: Decision, before: ScheduleIR) -> None:
    if not isinstance(decision, Decision):
        raise _BrokenRule("a decision is a Decision", f"it added {type(decision).__name__}")
    targets = _TARGETS.get(decision.kind) if isinstance(decision.kind, str) else None
    if targets is None:
        raise _BrokenRule(
            "a decision is of a known kind", f"it is {decision.kind!r}, not one of {sorted(_TARGETS)}"
        )
    if decision.target not in targets:
        raise _BrokenRule(
            f"{decision.kind} is for {' or '.join(targets)}", f"it was decided for {decision.target!r}"
        )
    if decision.kind == "lower":
        _check_number(decision, "limits only go down", 0, getattr(before, decision.target))
        return
    _check_rows(decision, len(getattr(before, decision.target)))
    if decision.kind in ("cap", "yield"):
        least = 0 if decision.target == "running" else 1
        _check_number(decision, "a cap is a number of tokens", least, MAX_CAP)
    elif decision.kind == "swap" and decision.value is not None:
        raise _BrokenRule("a swap has no value", f"it gave {decision.value!r}")
    elif decision.kind == "preempt" and decision.value not in WAYS:
        raise _BrokenRule("preemption is by recompute or swap", f"it chose {decision.value!r}")
    elif decision.kind == "defer" and not (isinstance(decision.value, str) and decision.value):
        raise _BrokenRule("a deferral has a reason", f"it gave {decision.value!r}")


def _check_number(decision: Decision, rule: str, least: int, most: int) -> None:
    value = decision.value
    if not isinstance(value, Integral) or not least <= int(value) <= most:
        raise _BrokenRule(
            rule, f"it set {decision.kind} {decision.target} to {value!r}; possible is {least} … {most}"
        )


def _check_rows(decision: Decision, num_rows: int) -> None:
    """Check that rows are positions, each named once, and that an order names all of them."""
    rows, target = decision.rows, decision.target
    if getattr(rows, "ndim", None) != 1 or rows.dtype.kind not in "iu":
        raise _BrokenRule("rows are positions", f"it named {target} rows by {rows!r}")
    invented = rows[(rows < 0) | (rows >= num_rows)]
    if len(invented):
        raise _BrokenRule(
            "rows are those that were given",
            f"there are {num_rows} {target} rows, and none is {_some(invented)}",
        )
    counts = np.bincount(rows, minlength=num_rows)
    doubled = np.flatnonzero(counts > 1)
    if len(doubled):
        raise _BrokenRule("a row is named once", f"it named {target} rows twice: {_some(doubled)}")
    if decision.kind == "order" and len(rows) != num_rows:
        raise _BrokenRule(
            "an order keeps all rows", f"it lost {target} rows: {_some(np.flatnonzero(counts == 0))}"
        )


def _some(rows: npt.NDArray[Any]) -> str:
    shown = ", ".join(map(str, rows[:8].tolist()))
    return f"{shown}, … ({len(rows)} of them)" if len(rows) > 8 else shown


_TARGETS: Mapping[str, tuple[str, ...]] = {
    "order": ("pending", "running"),
    "cap": ("pending", "running"),
    "yield": ("running",),
    "defer": ("pending",),
    "preempt": ("running",),
    "swap": ("running",),
    "lower": LIMITS,
}
