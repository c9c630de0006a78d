"""Each pass by examples: a schedule as text, and what the pass decides about it.

A file in `passes/` has cases of one pass. A case is a fact, the pass, a schedule, and after a line of dashes
the decisions with the orders that result. Run this file as a script to write the decisions anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import sagellm.kvmgr.scheduler_ir.passes as every_pass
from sagellm.core import SchedulerPassProtocol
from sagellm.kvmgr.scheduler_ir.schedule_text import schedule_from_text, schedule_to_text
from sagellm.kvmgr.scheduler_ir.schedule_verifier import verify_rewrite

FOLDER = Path(__file__).parent / "passes"


class Case(NamedTuple):
    """One fact about a pass."""

    fact: str
    code: str  # that makes the pass
    given: str
    decided: str

    def decide(self) -> str:
        """Return what the pass decides."""
        names = {each: getattr(every_pass, each) for each in every_pass.__all__}
        made: SchedulerPassProtocol = eval(self.code, names)
        before = schedule_from_text(self.given).with_state(made.start())
        after = verify_rewrite(made.name, before, made.run(before))
        lines = [f"  {each}" for each in after.decisions[len(before.decisions) :]] or ["  nothing"]
        for title, rows, order in (
            ("admission", after.pending, after.admission),
            ("preemption", after.running, after.preemption),
        ):
            if len(rows):
                lines.append(f"{title}: {' '.join(rows[row].request_id for row in order.tolist())}")
        return "\n".join(lines) + "\n"


def cases(path: Path) -> Iterator[Case]:
    """Read the cases of a file."""
    for text in path.read_text().split("=== ")[1:]:
        fact, code, rest = text.split("\n", 2)
        given, _, decided = rest.partition("---\n")
        yield Case(fact, code, given, decided)


def parameters() -> list[pytest.param]:
    return [
        pytest.param(path.stem, case, id=f"{path.stem}: {case.fact}")
        for path in sorted(FOLDER.glob("*.txt"))
        for case in cases(path)
    ]


@pytest.mark.parametrize(("name", "case"), parameters())
def test_a_pass_decides(name: str, case: Case) -> None:
    assert case.decide() == case.decided
    assert case.decided.startswith((f"  {name}: ", "  nothing"))


@pytest.mark.parametrize(("name", "case"), parameters())
def test_its_schedule_is_printed_as_it_was_read(name: str, case: Case) -> None:
    del name
    text = schedule_to_text(schedule_from_text(case.given))
    assert schedule_to_text(schedule_from_text(text)) == text


def test_every_pass_has_examples() -> None:
    names = {getattr(every_pass, each)().name for each in every_pass.__all__}
    assert names == {path.stem for path in FOLDER.glob("*.txt")}


if __name__ == "__main__":
    for file in FOLDER.glob("*.txt"):
        file.write_text(
            "".join(f"=== {c.fact}\n{c.code}\n{c.given}---\n{c.decide()}" for c in [*cases(file)])
        )
