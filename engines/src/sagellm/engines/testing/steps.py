"""Steps that are held back or take a known time, so that a test sees the same on any machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sagellm.core import StepCost, StepInput, StepOutput, TokenOutput, VirtualClock
from sagellm.engines import LLMEngine
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.engine_core.step_cost_fit import work_of

NUM_TOKENS = 100
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


def let_steps_take(engine: LLMEngine, clock: VirtualClock, cost: StepCost) -> None:
    """Advance the clock by what each step of an engine costs, whatever executor computes it."""
    worker = engine.client.core.parts.worker  # type: ignore[attr-defined]
    launch = worker.launch

    def take_time(step: StepInput) -> Callable[[], StepOutput]:
        launched: Callable[[], StepOutput] = launch(step)
        if len(step.seats):
            clock.advance_ns(round(cost.predict_ns(work_of(step))))
        return launched

    worker.launch = take_time


class HeldCores:
    """Holds requests in processes that are started with `environment`, until `release`.

    Those are cores, or processes with another argument. With no tokens they do not even load.
    """

    def __init__(self, folder: Path, argument: str = "core_process", num_tokens: int = NUM_TOKENS) -> None:
        self._gate = folder / "held"
        self._gate.touch()
        is_held = f"Path({str(self._gate)!r}).exists"
        lines = ["import time", f"while {is_held}(): time.sleep(0.01)"]
        if num_tokens:
            lines = ["from sagellm.engines.testing.steps import EngineCore, held"]
            lines += [f"EngineCore.step = held(EngineCore.step, {is_held}, {num_tokens})"]
        self.environment = patched_processes(folder, argument, "from pathlib import Path", *lines)

    def release(self) -> None:
        """Let all go on to their ends."""
        self._gate.unlink()


def patched_processes(folder: Path, argument: str, *lines: str) -> dict[str, str]:
    """Return the variables with which `python -m` runs lines first, where an argument has this text in it."""
    source = [
        "import sys",
        f"if sys.orig_argv[1:2] == ['-m'] and any({argument!r} in each for each in sys.orig_argv):",
        *(f"    {line}" for line in lines),
    ]
    (folder / "sitecustomize.py").write_text("\n".join(source))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
