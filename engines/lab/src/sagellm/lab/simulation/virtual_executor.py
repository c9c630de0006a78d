"""An executor that computes nothing: a step takes the virtual time that a cost model predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import (
    EMPTY,
    ExecutorProtocol,
    SequenceId,
    StepCost,
    StepInput,
    StepOutput,
    TokenIds,
    VirtualClock,
)
from sagellm.core.protocols.step import Runs
from sagellm.engines.engine_core.step_cost_fit import decode_works, work_of

Ints = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]

TOKEN, END = 0, 2**31 - 1
"""What is drawn where a trace records no tokens, and what ends every output."""

VOCAB_SIZE = END + 1


class RecordedOutput(NamedTuple):
    """What a trace says about an output; a recording has the tokens that a cache keeps, so not the last."""

    num_tokens: int
    token_ids: TokenIds = EMPTY


OnStep = Callable[[StepInput, int], None]
"""Called before the clock advances with each step, or several in a row, and when the last of them begins."""


class VirtualExecutor(ExecutorProtocol):
    """Advances the clock by a step's predicted duration, and draws the outputs that a trace records.

    `outputs` has that of each sequence that may arrive. Its last token is END, so that `max_tokens` need not
    tell the scheduler how long it will be. KV operations take no time.
    """

    def __init__(
        self,
        cost: StepCost,
        clock: VirtualClock,
        outputs: Mapping[SequenceId, RecordedOutput],
        num_seats: int,
        *,
        host_step_ns: int = 0,
    ) -> None:
        """Create an executor. `host_step_ns` pass between two steps."""
        self._cost, self._clock, self._outputs = cost, clock, outputs
        self._host_step_ns = host_step_ns
        self._last: npt.NDArray[np.int64] = np.zeros(num_seats, np.int64)  # position of END, by seat
        self._begin: npt.NDArray[np.int64] = np.zeros(num_seats, np.int64)  # of the output, by seat
        self._tokens: dict[int, npt.NDArray[np.int32]] = {}  # of recorded outputs, by seat
        self._output: StepOutput | None = None
        self.on_step: OnStep | None = None
        self.next_arrival_ns: Callable[[], float] = lambda: inf
        self.num_steps = 0  # that computed something
        self.num_tokens = 0  # that they computed
        self.busy_ns = 0  # that they took

    def submit(self, step: StepInput) -> None:
        """Advance the clock."""
        for arrival in step.arrivals:
            output = self._outputs[arrival.sequence_id]
            self._begin[arrival.seat] = arrival.num_prompt
            self._last[arrival.seat] = arrival.num_prompt + output.num_tokens - 1
            self._tokens.pop(arrival.seat, None)
            if len(output.token_ids):
                self._tokens[arrival.seat] = np.frombuffer(output.token_ids.data, np.int32)
        if not len(step.seats):
            took_ns: list[int] = []
        elif step.num_steps == 1:
            took_ns = [round(self._cost.predict_ns(work_of(step)))]
        else:
            took_ns = [
                round(self._cost.predict_ns(work)) for work in decode_works(step.starts, step.num_steps)
            ]
        tokens = self._draw(step)
        if took_ns:
            self.num_steps += len(took_ns)
            self.num_tokens += step.num_tokens
            total_ns = sum(took_ns) + (len(took_ns) - 1) * self._host_step_ns
            if self.on_step is not None:
                self.on_step(step, self._clock.now_ns() + total_ns - took_ns[-1])
            self.busy_ns += sum(took_ns)
            self._clock.advance_ns(total_ns)
        self._output = StepOutput(
            step=step.step,
            tokens=tokens,
            num_accepted=np.zeros_like(tokens.counts),
            took_ns=took_ns if step.num_steps > 1 else (),
        )

    def foresee(self, seats: Places, num_computed: Ints, *, num_steps: int, deadline_s: float) -> int:
        """Return for how many steps these decodes run alone: the next request arrives, or the first ends."""
        num_steps = min(num_steps, int((self._last.take(seats) - num_computed).min()))
        now_ns, arrival_ns = self._clock.now_ns(), self.next_arrival_ns()
        for number, work in enumerate(decode_works(num_computed, num_steps), start=1):
            now_ns += round(self._cost.predict_ns(work))
            if now_ns >= arrival_ns:
                return number
            now_ns += self._host_step_ns
            if now_ns / 1e9 > deadline_s:
                return number
        return num_steps

    def _draw(self, step: StepInput) -> Runs:
        """Return the tokens of all rows that are sampled."""
        num_steps = step.num_steps
        counts = step.is_sampled.astype(np.int32)
        sampled = np.flatnonzero(counts)
        seats, ends = step.seats[sampled], (step.starts + step.num_new)[sampled].astype(np.int64)
        if num_steps > 1:
            counts *= np.int32(num_steps)
            seats = seats.repeat(num_steps)
            ends = (ends[:, None] + np.arange(1 - num_steps, 1)).ravel()
        ids = np.full(len(ends), TOKEN, np.int32)
        if self._tokens:
            places = ends - self._begin[seats]
            for row, (seat, place) in enumerate(zip(seats.tolist(), places.tolist(), strict=True)):
                tokens = self._tokens.get(seat, ())
                if place < len(tokens):
                    ids[row] = tokens[place]
        ids[ends >= self._last[seats]] = END
        return Runs(ids, counts)

    def collect(self) -> StepOutput:
        """Return the output of the step."""
        output, self._output = self._output, None
        assert output is not None, "a step is submitted before it is collected"
        return output
