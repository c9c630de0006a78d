"""Tokens that are drawn on the device and stay there: the next step takes them before the host has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import Runs, StepInput, StepOutput
from sagellm.engines.sampling.filters import dropped_share
from sagellm.engines.sampling.random import uniforms
from sagellm.engines.sampling.rows import BadLogitsError
from sagellm.engines.worker.seat_state import SeatState

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns tokens (rows,) int64, -1 for rows that are not distributions, of logits (rows, vocab) and settings.

Settings are (rows, 5) float64: temperature, min-p, top-k, 1 - top-p, and a uniform number; 0, 0, 0 and a
negative number switch them off."""

Places = npt.NDArray[np.intp]


def device_draw(device: torch.device) -> Draw | None:
    """Return how tokens are drawn without waiting for the device; None: only the sampler draws them."""
    if device.type != "cuda":
        return None
    try:
        from sagellm.accel.cuda.sampling import draw_tokens
    except ImportError:  # without triton
        return None
    draw: Draw = draw_tokens
    return draw


@dataclass(eq=False)
class LateStep:
    """A step whose tokens are on their way to the host."""

    step: StepInput
    rows: Places  # that are sampled
    positions: npt.NDArray[np.int32]  # of the tokens they draw
    generations: npt.NDArray[np.int64]
    tokens: torch.Tensor  # (rows,) int64 on the host, once they have arrived
    arrived: torch.cuda.Event | None
    output: StepOutput | None = None


class LateTokens:
    """Draws for whole steps on the device, and has the last token of each seat there.

    It takes steps whose sampled rows ask for nothing but a token: no drafts, log-probabilities, penalties
    or logits processors.
    """

    def __init__(self, draw: Draw, state: SeatState, device: torch.device) -> None:
        num_seats = len(state.generation)
        self._draw, self._state, self._device = draw, state, device
        self._last = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._step_of = np.zeros(num_seats, np.int64)  # that draws a token the host does not have; 0: none
        self._generation = np.full(num_seats, -1, np.int64)  # for which these hold:
        self._is_plain = np.zeros(num_seats, np.bool_)
        self._settings = np.zeros((num_seats, 4))

    def takes(self, step: StepInput, rows: Places) -> bool:
        """Say whether a step's sampled rows can be drawn on the device. Processors have been started."""
        if step.drafts is not None or step.scored:
            return False
        seats = step.seats[rows]
        for seat in seats[self._generation[seats] != self._state.generation[seats]].tolist():
            self._learn(seat)
        return bool(self._is_plain[seats].all())

    def _learn(self, seat: int) -> None:
        params = self._state[seat].params
        self._is_plain[seat] = not (
            self._state.logits_states[seat] or params.has_penalties or params.logprobs is not None
        )
        temperature = 0.0 if params.is_greedy else params.temperature
        self._settings[seat] = temperature, params.min_p, params.top_k, dropped_share(params.top_p)
        self._generation[seat], self._step_of[seat] = self._state.generation[seat], 0

    def fill_in(self, step: StepInput, input_ids: torch.Tensor) -> None:
        """Write the tokens that the host does not have yet into a step's input (tokens,)."""
        rows = np.flatnonzero(self._is_late(step.seats))
        if not len(rows):
            return
        assert (step.num_new[rows] == 1).all(), "a row whose last token is in flight computes that token"
        ends = np.cumsum(step.num_new, dtype=np.int64)
        places, seats = self._upload(np.stack((ends[rows] - 1, step.seats[rows].astype(np.int64))))
        input_ids.index_copy_(0, places, self._last.index_select(0, seats))

    def _is_late(self, seats: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        is_theirs: npt.NDArray[np.bool_] = self._generation[seats] == self._state.generation[seats]
        return is_theirs & (self._step_of[seats] > 0)

    def launch(self, step: StepInput, rows: Places, logits: torch.Tensor) -> LateStep:
        """Draw a token for each sampled row, for the next step and, later, for the host."""
        seats, ends = step.seats[rows], (step.starts + step.num_new)[rows]
        tokens = self._draw(logits, self._upload(self._row_settings(seats, ends, logits.shape[1])))
        (places,) = self._upload(seats.astype(np.int64)[None])
        self._last.index_copy_(0, places, tokens.clamp(min=0))
        self._step_of[seats] = step.step
        arrived = None
        if self._device.type == "cuda":
            host = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(self._device))
        return LateStep(step, rows, ends, self._state.generation[seats], tokens, arrived)

    def finish(self, late: LateStep) -> StepOutput:
        """Wait for a step's tokens, and write them into the seats that their sequences still have."""
        if late.output is None:
            if late.arrived is not None:
                late.arrived.synchronize()
            late.output = self._output(late)
        return late.output

    def _output(self, late: LateStep) -> StepOutput:
        step, seats = late.step, late.step.seats[late.rows]
        is_theirs = self._state.generation[seats] == late.generations
        self._step_of[seats[is_theirs & (self._step_of[seats] == step.step)]] = 0
        ids = late.tokens.numpy().astype(np.int32)
        if (bad := np.flatnonzero(ids < 0)).size:
            return StepOutput.failed(step, BadLogitsError(bad.tolist()))
        self._state.tokens[seats[is_theirs], late.positions[is_theirs]] = ids[is_theirs]
        counts = step.is_sampled.astype(np.int32)
        return StepOutput(
            step=step.step, tokens=Runs(ids, counts), num_accepted=np.zeros(len(counts), np.int32)
        )

    def _row_settings(
        self, seats: npt.NDArray[np.int32], ends: npt.NDArray[np.int32], vocab_size: int
    ) -> npt.NDArray[np.float64]:
        settings = np.empty((len(seats), 5))
        settings[:, :4] = self._settings[seats]
        settings[settings[:, 2] >= vocab_size, 2] = 0.0
        settings[:, 4] = 0.0
        random = np.flatnonzero(settings[:, 0] > 0.0)
        if len(random):
            arrivals = [self._state[seat] for seat in seats[random].tolist()]
            positions = [
                end - each.num_prompt for end, each in zip(ends[random].tolist(), arrivals, strict=True)
            ]
            settings[random, 4] = uniforms([each.seed for each in arrivals], positions)
        return settings

    def _upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
