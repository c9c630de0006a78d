"""What an examination finds: facts, and problems with their remedies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sagellm.core import PluginRegistry, Topology
from sagellm.engines.config.schema import EngineConfig


@dataclass(frozen=True)
class Problem:
    """Something that is wrong. An error prevents an engine from working, a warning slows it down."""

    severity: Literal["error", "warning"]
    what: str
    remedy: str


@dataclass
class Section:
    """One subject: facts by name, in order, and what is wrong with them."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def error(self, what: str, remedy: str) -> None:
        """Add a problem that prevents an engine from working."""
        self.problems.append(Problem("error", what, remedy))

    def warn(self, what: str, remedy: str) -> None:
        """Add a problem that an engine can live with."""
        self.problems.append(Problem("warning", what, remedy))


@dataclass(frozen=True, kw_only=True)
class ExaminationContext:
    """What the examinations share. `topology` is None if no reader works."""

    registry: PluginRegistry
    config: EngineConfig
    topology: Topology | None


Examination = Callable[[ExaminationContext], Section]


def examine(examination: Examination, context: ExaminationContext) -> Section:
    """Run one examination. If it raises, that is the finding."""
    section = Section(examination.__name__.removeprefix("examine_"))
    try:
        return examination(context)
    except (ImportError, OSError) as error:  # OSError: a library that torch loads is missing
        remedy = f"reinstall it: pip install --force-reinstall {getattr(error, 'name', None) or 'torch'}"
        section.error(_failure(section, error), remedy)
    except Exception as error:
        section.error(_failure(section, error), "this is unexpected; report it with this text")
    return section


def _failure(section: Section, error: Exception) -> str:
    return f"{section.title} could not be examined: {type(error).__name__}: {error}"


def as_text(sections: Sequence[Section]) -> str:
    """Write facts by section, then problems with their remedies."""
    lines: list[str] = []
    for section in sections:
        if not section.facts:
            continue
        lines.append(section.title)
        width = max((len(name) for name in section.facts), default=0)
        lines += [f"  {name.ljust(width)}  {_fact(value)}" for name, value in section.facts.items()]
        lines.append("")
    problems = [problem for section in sections for problem in section.problems]
    for problem in problems:
        lines += [f"{problem.severity}: {problem.what}", f"  to fix it: {problem.remedy}"]
    return "\n".join(lines + ([] if problems else ["Nothing is wrong."]))


def _fact(value: object) -> str:
    if value is None or value == [] or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
