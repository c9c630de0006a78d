"""What the conformance kit found out about a provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["passed", "failed", "skipped", "not run"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule of a contract that a provider breaks: what was done, expected and found."""

    rule: str  # no block is freed twice
    meaning: str  # what the contract says about it
    found: str
    expected: str = ""  # empty if the rule says it
    cases: tuple[str, ...] = ()  # the arguments with which it failed, if there are several
    calls: tuple[str, ...] = ()  # the last ones; for random operations, the fewest that show the fault
    num_calls: int = 0
    cause: str = ""  # the error and where it was raised; equal for every rule that it breaks

    @property
    def sentence(self) -> str:
        """The rule, what was expected and what was found."""
        expected = f"expected {self.expected}, found {self.found}" if self.expected else self.found
        return f"{self.rule}: {expected}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The verdict on one rule. `reason` says why it was skipped."""

    aspect: str
    rule: str
    outcome: Outcome
    reason: str = ""
    fault: Fault | None = None


@dataclass(frozen=True, kw_only=True)
class ProviderReport:
    """The verdict on one provider. `unchecked` says why there is none.

    `num_calls` counts the kit's calls of each method that the provider implements, except in tests of cost
    and threads; `not_checked` names the methods that it never called, and says why.
    """

    kind: str
    name: str
    results: tuple[CheckResult, ...] = ()
    unchecked: str = ""
    num_calls: Mapping[str, int] = field(default_factory=dict)
    not_checked: tuple[str, ...] = ()

    @property
    def provider(self) -> str:
        """Kind and name."""
        return f"{self.kind} {self.name}"

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The rules that it breaks."""
        return tuple(result.fault for result in self.results if result.fault is not None)

    @property
    def is_faulty(self) -> bool:
        """Whether a rule is broken, or could not be tested because of other failures."""
        return any(result.outcome in ("failed", "not run") for result in self.results)

    @property
    def is_checked(self) -> bool:
        """Whether every method was called."""
        return not self.unchecked and not self.not_checked

    @property
    def num_called(self) -> int:
        """How many of its methods the kit called."""
        return sum(num_calls > 0 for num_calls in self.num_calls.values())

    @property
    def num_passed(self) -> int:
        """How many rules hold."""
        return sum(result.outcome == "passed" for result in self.results)
