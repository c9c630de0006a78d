"""Finds the few events of a failing run without which it would not fail."""

from __future__ import annotations

from collections.abc import Callable

from sagellm.lab.simulation.served.plan import Plan
from sagellm.lab.simulation.served.world import Outcome, run_plan


def shrink(plan: Plan, kind: str, *, run: Callable[[Plan], Outcome] = run_plan, max_runs: int = 300) -> Plan:
    """Drop events while a violation of the same kind remains: first many at once, then one by one.

    Greedy, with at most `max_runs` runs: no single event of the result can be left out if that many suffice.
    """
    num_left = max_runs
    size = max(1, len(plan.events) // 2)
    while size:
        start = 0
        while start < len(plan.numbers) and num_left:
            dropped = plan.numbers[start : start + size]
            smaller = plan.only([number for number in plan.numbers if number not in dropped])
            num_left -= 1
            found = run(smaller).violation
            if found is not None and found.kind == kind:
                plan = smaller
            else:
                start += size
        size //= 2
    return plan
