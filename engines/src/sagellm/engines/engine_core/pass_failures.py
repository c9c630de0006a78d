"""Which scheduler passes an engine goes on without. Loads nothing heavy: commands read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sagellm.core import EngineMetrics


@dataclass(kw_only=True)
class PassFailures:
    """The passes that failed since passes were set last, and why. They are removed; the others run on."""

    failures: dict[str, str] = field(default_factory=dict)


def pass_failures(engine: EngineMetrics) -> dict[str, str]:
    """Return the scheduler passes that failed and were removed, and why."""
    known: Any = engine.modules.get("scheduler_pass")
    return known.failures if isinstance(known, PassFailures) else {}
