"""Tokens that a kernel draws; they stay on the device, from where the next step takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import StepInput, StepOutput
from sagellm.core.protocols.step import Runs
from sagellm.engines.sampling.draws import Draw
from sagellm.engines.sampling.random import numbers_of
from sagellm.engines.sampling.rows import BadLogitsError
from sagellm.engines.worker.seat_draws import RowSettings, SeatDraws, Seats
from sagellm.engines.worker.seat_state import SeatState

Places = npt.NDArray[np.intp]


@dataclass(eq=False)
class LateStep:
    """A step whose tokens are on their way to the host."""

    step: StepInput
    seats: Seats  # that are sampled
    positions: npt.NDArray[np.int32]  # of the tokens they draw
    generations: npt.NDArray[np.int64]
    tokens: torch.Tensor  # (seats,) int64 on the host, once they have arrived
    arrived: torch.cuda.Event | None
    output: StepOutput | None = None


class LateTokens:
    """Draws for whole steps on the device, and has the last token of each seat there."""

    def __init__(self, draw: Draw, draws: SeatDraws, state: SeatState, device: torch.device) -> None:
        num_seats = len(state.generation)
        self._draw, self._draws, self._state, self._device = draw, draws, state, device
        self._last = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._step_of = np.zeros(num_seats, np.int64)  # that draws a token the host does not have; 0: none
        self._generation = np.full(num_seats, -1, np.int64)  # for which this holds

    def fill_in(self, step: StepInput, input_ids: torch.Tensor) -> None:
        """Write the tokens that the host does not have yet into a step's input (tokens,)."""
        rows = np.flatnonzero(self._is_late(step.seats))
        if not len(rows):
            return
        assert (step.num_new[rows] == 1).all(), "a row whose last token is in flight computes that token"
        ends = np.cumsum(step.num_new, dtype=np.int64)
        places, seats = self._upload(np.stack((ends[rows] - 1, step.seats[rows].astype(np.int64))))
        input_ids.index_copy_(0, places, self._last.index_select(0, seats))

    def _is_late(self, seats: Seats) -> npt.NDArray[np.bool_]:
        is_theirs: npt.NDArray[np.bool_] = self._generation[seats] == self._state.generation[seats]
        return is_theirs & (self._step_of[seats] > 0)

    def launch(self, step: StepInput, rows: Places, logits: torch.Tensor) -> LateStep:
        """Draw a token for each sampled row, for the next step and, later, for the host."""
        seats, ends = step.seats[rows], (step.starts + step.num_new)[rows]
        settings = _with_numbers(self._draws.settings(seats, ends), logits.shape[1])
        tokens = self._draw(logits, self._upload(settings))
        (places,) = self._upload(seats.astype(np.int64)[None])
        self._last.index_copy_(0, places, tokens.clamp(min=0))
        self._step_of[seats], self._generation[seats] = step.step, self._state.generation[seats]
        arrived = None
        if self._device.type == "cuda":
            host = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(self._device))
        return LateStep(step, seats, ends, self._state.generation[seats], tokens, arrived)

    def finish(self, late: LateStep) -> StepOutput:
        """Wait for a step's tokens, and write them into the seats that their sequences still have."""
        if late.output is None:
            if late.arrived is not None:
                late.arrived.synchronize()
            late.output = self._output(late)
        return late.output

    def _output(self, late: LateStep) -> StepOutput:
        step, seats = late.step, late.seats
        is_theirs = self._state.generation[seats] == late.generations
        self._step_of[seats[is_theirs & (self._step_of[seats] == step.step)]] = 0
        ids = late.tokens.numpy().astype(np.int32)
        if not (ids < 0).any():
            self._state.tokens[seats[is_theirs], late.positions[is_theirs]] = ids[is_theirs]
        return output_of(step, ids)

    def _upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def output_of(step: StepInput, ids: npt.NDArray[np.int32]) -> StepOutput:
    """Return the output of a step whose sampled rows drew these tokens; -1: the row is not a distribution."""
    if (bad := np.flatnonzero(ids < 0)).size:
        return StepOutput.failed(step, BadLogitsError(bad.tolist()))
    counts = step.is_sampled.astype(np.int32)
    return StepOutput(step=step.step, tokens=Runs(ids, counts), num_accepted=np.zeros_like(counts))


def _with_numbers(settings: RowSettings, vocab_size: int) -> npt.NDArray[np.float64]:
    filters = settings.filters
    filters[filters[:, 2] >= vocab_size, 2] = 0.0
    random = np.flatnonzero(filters[:, 0] > 0.0)
    if len(random):
        filters[random, 4] = numbers_of(settings.keys[random], settings.positions[random])
    return filters
