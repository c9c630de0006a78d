"""Keeps requests from ending, so that what a test does meanwhile comes before their end on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sagellm.core import TokenOutput
from sagellm.engines.engine_core.core import EngineCore

NUM_TOKENS = 30
"""The output that a held request of another process gets."""

Step = Callable[[EngineCore], Sequence[TokenOutput]]


def held(step: Step, is_held: Callable[[], bool], num_tokens: int = NUM_TOKENS) -> Step:
    """Have steps do nothing while `is_held` says so and every sequence has that many tokens of output."""

    def take(core: EngineCore) -> Sequence[TokenOutput]:
        scheduler = core.scheduler
        if is_held() and all(
            scheduler[each].num_output_tokens >= num_tokens for each in scheduler.sequence_ids
        ):
            time.sleep(0.002)
            return []
        return step(core)

    return take


class HeldCores:
    """Holds requests in processes that are started with `environment`, until `release`."""

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "held"
        self._gate.touch()
        lines = (
            "import sys",
            "if 'sagellm.engines.remote.core_process' in sys.orig_argv:",
            f"    sys.path.append({str(Path(__file__).parent)!r})",
            "    from pathlib import Path",
            "    from held_steps import EngineCore, held",
            f"    EngineCore.step = held(EngineCore.step, Path({str(self._gate)!r}).exists)",
        )
        (folder / "sitecustomize.py").write_text("\n".join(lines))
        self.environment = {"PYTHONPATH": str(folder)}

    def release(self) -> None:
        """Let all requests go on to their ends."""
        self._gate.unlink()
