"""An executor that computes nothing: a step takes the virtual time that a cost model predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from sagellm.core import ExecutorProtocol, SequenceId, StepCost, StepInput, StepOutput, VirtualClock
from sagellm.core.protocols.step import Runs
from sagellm.engines.engine_core.step_cost_fit import work_of

TOKEN, END = 0, 1
"""What is drawn in place of tokens: one that continues an output, and the one that ends it."""

VOCAB_SIZE = 2

OnStep = Callable[[StepInput], None]
"""Called with each step before the clock advances."""


class VirtualExecutor(ExecutorProtocol):
    """Advances the clock by a step's predicted duration, and ends outputs at their recorded lengths.

    `output_lens` has the length of each sequence that may arrive. An output ends with END, so that
    `max_tokens` need not tell the scheduler how long it will be. KV operations take no time.
    """

    def __init__(
        self, cost: StepCost, clock: VirtualClock, output_lens: Mapping[SequenceId, int], num_seats: int
    ) -> None:
        self._cost, self._clock, self._output_lens = cost, clock, output_lens
        self._last: npt.NDArray[np.int64] = np.zeros(num_seats, np.int64)  # position of END, by seat
        self._output: StepOutput | None = None
        self.on_step: OnStep | None = None
        self.num_steps = 0  # that computed something
        self.num_tokens = 0  # that they computed
        self.busy_ns = 0  # that they took

    def submit(self, step: StepInput) -> None:
        """Advance the clock."""
        for arrival in step.arrivals:
            self._last[arrival.seat] = arrival.num_prompt + self._output_lens[arrival.sequence_id] - 1
        counts = step.is_sampled.astype(np.int32)
        sampled = np.flatnonzero(counts)
        ends = (step.starts + step.num_new)[sampled]
        ids = np.where(ends >= self._last[step.seats[sampled]], END, TOKEN).astype(np.int32)
        if len(step.seats):
            work = work_of(step)
            self.num_steps += 1
            self.num_tokens += work.num_tokens
            if self.on_step is not None:
                self.on_step(step)
            took_ns = round(self._cost.predict_ns(work))
            self.busy_ns += took_ns
            self._clock.advance_ns(took_ns)
        self._output = StepOutput(
            step=step.step, tokens=Runs(ids, counts), num_accepted=np.zeros_like(counts)
        )

    def collect(self) -> StepOutput:
        """Return the output of the step."""
        output, self._output = self._output, None
        assert output is not None, "a step is submitted before it is collected"
        return output
