"""Random operations, reduced to the fewest and smallest ones that show a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_SETTINGS = settings(
    max_examples=120,
    stateful_step_count=40,
    derandomize=True,  # a plugin that failed once fails again
    database=None,
    deadline=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def run_operations(make: Callable[[], RuleBasedStateMachine]) -> None:
    """Run random operations on fresh machines and raise the error of the shortest sequence that fails.

    `make` is called for every sequence, last of all for the shortest one, and must return a machine
    whose object under test is new.
    """
    # Any callable will do, though the annotated type is a class.
    run_state_machine_as_test(cast("type[RuleBasedStateMachine]", make), settings=_SETTINGS)
