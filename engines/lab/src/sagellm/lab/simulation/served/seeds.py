"""Runs many seeds, and says of each failing one how it is run again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sagellm.lab.simulation.served.plan import Plan, draw_plan
from sagellm.lab.simulation.served.shrink import shrink
from sagellm.lab.simulation.served.world import Outcome, Violation, run_plan

_COLLECT_EVERY = 20
"""Seeds between two garbage collections; a run leaves some megabytes of garbage."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A seed with a violation, and the events that suffice for it."""

    seed: int
    violation: Violation
    plan: Plan  # shrunk

    @property
    def command(self) -> str:
        """The command that runs the shrunk plan again."""
        events = ",".join(map(str, self.plan.numbers)) or "none"
        return f"sage llm simulate --faults --seeds 1 --first {self.seed} --only {events}"

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.violation}", f"  again: {self.command}", "  events that suffice:"]
        events = zip(self.plan.numbers, self.plan.events, strict=True)
        return "\n".join([*lines, *(f"  {number:4d} {event}" for number, event in events)])


@dataclass(kw_only=True)
class Totals:
    """What the runs amounted to."""

    num_seeds: int = 0
    num_answered: int = 0
    num_attempts: int = 0
    num_restarts: int = 0
    virtual_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one run."""
        self.num_seeds += 1
        self.num_answered += outcome.num_answered
        self.num_attempts += outcome.num_attempts
        self.num_restarts += outcome.num_restarts
        self.virtual_s += outcome.virtual_s


def plan_of(seed: int, only: Iterable[int] | None = None) -> Plan:
    """Return a seed's plan, or some of its events."""
    plan = draw_plan(seed)
    return plan if only is None else plan.only(set(only))


def run_seeds(
    seeds: Iterable[int],
    totals: Totals,
    *,
    only: Iterable[int] | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> Iterator[Failure]:
    """Run seeds one after the other and yield those that fail, shrunk."""
    kept = None if only is None else set(only)
    for number, seed in enumerate(seeds):
        plan = plan_of(seed, kept)
        outcome = run_plan(plan)
        totals.add(outcome)
        advance(1)
        if outcome.violation is not None:
            smaller = shrink(plan, outcome.violation.kind)
            yield Failure(seed=seed, violation=outcome.violation, plan=smaller)
        if number % _COLLECT_EVERY == _COLLECT_EVERY - 1:
            gc.collect()
