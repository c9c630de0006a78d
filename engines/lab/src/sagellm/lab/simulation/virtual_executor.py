"""An executor that computes nothing: a step takes the virtual time that a cost model predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from sagellm.engines.engine_core.step_cost_fit import work_of

TOKEN, END = 0, 2**31 - 1
"""What is drawn where a trace records no tokens, and what ends every output."""

VOCAB_SIZE = END + 1


class RecordedOutput(NamedTuple):
    """What a trace says about an output; a recording has the tokens that a cache keeps, so not the last."""

    num_tokens: int
    token_ids: TokenIds = EMPTY


OnStep = Callable[[StepInput], None]
"""Called with each step before the clock advances."""


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
    ) -> None:
        self._cost, self._clock, self._outputs = cost, clock, outputs
        self._last: npt.NDArray[np.int64] = np.zeros(num_seats, np.int64)  # position of END, by seat
        self._begin: npt.NDArray[np.int64] = np.zeros(num_seats, np.int64)  # of the output, by seat
        self._tokens: dict[int, npt.NDArray[np.int32]] = {}  # of recorded outputs, by seat
        self._output: StepOutput | None = None
        self.on_step: OnStep | None = None
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
        counts = step.is_sampled.astype(np.int32)
        sampled = np.flatnonzero(counts)
        seats, ends = step.seats[sampled], (step.starts + step.num_new)[sampled]
        ids = np.full(len(sampled), TOKEN, np.int32)
        if self._tokens:
            places = ends - self._begin[seats]
            for row, (seat, place) in enumerate(zip(seats.tolist(), places.tolist(), strict=True)):
                tokens = self._tokens.get(seat, ())
                if place < len(tokens):
                    ids[row] = tokens[place]
        ids[ends >= self._last[seats]] = END
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
