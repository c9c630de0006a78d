"""Tokens drawn on the host as part of their step; rows that wait for masks, when these come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from sagellm.core import EngineError, StepInput, StepOutput
from sagellm.core.protocols.engine import PromptScores, SampledToken
from sagellm.core.protocols.step import Runs, TokenMasks
from sagellm.engines.sampling.draws import Logits
from sagellm.engines.sampling.rows import BadLogitsError
from sagellm.engines.worker.masks import masks_at
from sagellm.engines.worker.row_draws import Drawn, RowDraw
from sagellm.engines.worker.sampled import Places, Sampled, sampled_positions
from sagellm.engines.worker.seat_state import SeatState

if TYPE_CHECKING:
    import torch


Hidden: TypeAlias = "torch.Tensor | npt.NDArray[np.float32]"
"""Hidden states (rows, hidden_size), of the kind that the logits are."""

Ids: TypeAlias = "torch.Tensor | npt.NDArray[np.generic]"


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step whose forward pass is launched."""

    step: StepInput
    sampled: Sampled
    scores: Mapping[int, PromptScores]
    hidden: Hidden | None  # (positions of its `hidden_rows`, hidden_size)
    waiting: Places | None = None  # positions that wait for masks
    logits: Logits | None = None  # while some do
    tokens: npt.NDArray[np.integer] | None = None  # (positions,) once they are on the host
    logprobs: dict[int, SampledToken] = field(default_factory=dict)  # by position
    output: StepOutput | None = None


class StepDraws(ABC):
    """Draws the tokens of steps, and provides them to the next one.

    For each step, the worker calls `fill_in`, launches the forward pass, calls `launch`, `add_masks` if rows
    wait for masks, and at last `finish`; the next step may be launched before that.
    """

    @abstractmethod
    def fill_in(self, step: StepInput, input_ids: Ids) -> None:
        """Write tokens that the host does not have yet into a step's input (tokens,)."""

    @abstractmethod
    def launch(
        self,
        step: StepInput,
        logits: Logits,
        scores: Mapping[int, PromptScores],
        hidden: Hidden | None,
    ) -> LaunchedStep:
        """Draw at all sampled positions whose rows do not wait for masks, from logits (positions, vocab).

        `scores` and `hidden`, those of a LaunchedStep, are for its output.
        """

    @abstractmethod
    def add_masks(self, launched: LaunchedStep, masks: TokenMasks) -> None:
        """Draw the other rows."""

    @abstractmethod
    def finish(self, launched: LaunchedStep) -> StepOutput:
        """Return the output, waiting for it if need be."""


class HostTokens(StepDraws):
    """Draws at once."""

    def __init__(self, draw: RowDraw, state: SeatState) -> None:
        self._draw, self._state = draw, state

    def fill_in(self, step: StepInput, input_ids: Ids) -> None:
        """Do nothing: the host has all tokens."""

    def launch(
        self,
        step: StepInput,
        logits: Logits,
        scores: Mapping[int, PromptScores],
        hidden: Hidden | None,
    ) -> LaunchedStep:
        """Draw the rows that do not wait for masks."""
        launched = LaunchedStep(step, sampled_positions(step), scores, hidden)
        if step.late_masks is None:
            masks = masks_at(step.masks, None, len(launched.sampled.seats), logits.shape[1])
            drawn = self._draw(logits, None, launched.sampled, masks)
            launched.output = self._output(launched, drawn)
            return launched
        is_late = step.late_masks[launched.sampled.rows]
        launched.logits, launched.waiting = logits, is_late.nonzero()[0]
        launched.tokens = np.full(len(is_late), -1, np.int64)
        self._draw_some(launched, (~is_late).nonzero()[0], step.masks)
        return launched

    def add_masks(self, launched: LaunchedStep, masks: TokenMasks) -> None:
        """Draw the rows that waited."""
        assert launched.waiting is not None, "some rows wait"
        self._draw_some(launched, launched.waiting, masks)
        launched.waiting = launched.logits = None
        assert launched.tokens is not None, "a step with rows that wait has tokens"
        launched.output = self._output(launched, Drawn(launched.tokens, launched.logprobs))

    def finish(self, launched: LaunchedStep) -> StepOutput:
        """Return the output. Raises EngineError if rows still wait for masks."""
        if launched.output is None:
            raise EngineError(f"step {launched.step.step} is collected before the masks that it waits for")
        return launched.output

    def _draw_some(self, launched: LaunchedStep, which: Places, masks: TokenMasks | None) -> None:
        assert launched.logits is not None, "logits stay while rows wait"
        assert launched.tokens is not None, "a step with rows that wait has tokens"
        if not len(which):
            return
        num_positions, vocab_size = len(launched.tokens), launched.logits.shape[1]
        found = masks_at(masks, which, num_positions, vocab_size)
        drawn = self._draw(launched.logits, which, launched.sampled.take(which), found)
        launched.tokens[which] = drawn.tokens
        launched.logprobs.update({int(which[place]): each for place, each in drawn.logprobs.items()})

    def _output(self, launched: LaunchedStep, drawn: Drawn) -> StepOutput:
        ids, is_kept = drawn.tokens.astype(np.int32), launched.sampled.kept(drawn.tokens)
        output = output_of(launched, ids, is_kept, drawn.logprobs)
        if not output.errors:
            launched.sampled.write(self._state.tokens, ids, is_kept)
        return output


def output_of(
    launched: LaunchedStep,
    ids: npt.NDArray[np.int32],
    is_kept: npt.NDArray[np.bool_] | None,
    logprobs: Mapping[int, SampledToken],
) -> StepOutput:
    """Return the output of a step whose positions drew these tokens; -1: not a distribution."""
    step, rows = launched.step, launched.sampled.rows
    is_bad = ids < 0 if is_kept is None else (ids < 0) & is_kept
    if np.count_nonzero(is_bad):
        return StepOutput.failed(step, BadLogitsError(rows[is_bad].tolist()))
    if is_kept is None:
        counts = step.is_sampled.astype(np.int32)
        num_accepted = np.zeros_like(counts)
    else:
        counts = np.bincount(rows[is_kept], minlength=len(step.seats)).astype(np.int32)
        num_accepted, ids = np.maximum(counts - 1, 0), ids[is_kept]
    by_row: dict[int, list[SampledToken]] = {}
    for place in sorted(logprobs):
        if is_kept is None or is_kept[place]:
            by_row.setdefault(int(rows[place]), []).append(logprobs[place])
    tokens = Runs(ids, counts)
    return StepOutput(
        step=step.step,
        tokens=tokens,
        num_accepted=num_accepted,
        logprobs=by_row,
        scores=launched.scores,
        hidden_states={} if launched.hidden is None else _hidden_by_row(launched, launched.hidden, is_kept),
    )


def _hidden_by_row(
    launched: LaunchedStep, hidden: Hidden, is_kept: npt.NDArray[np.bool_] | None
) -> dict[int, npt.NDArray[np.float32]]:
    """Return the hidden states (tokens, hidden_size) of the positions that count, by row."""
    assert launched.step.hidden_rows is not None, "some rows want hidden states"
    rows, states = launched.sampled.rows, hidden if isinstance(hidden, np.ndarray) else hidden.cpu().numpy()
    is_asked = launched.step.hidden_rows[rows]
    if is_kept is not None:
        states = states[is_kept[is_asked]]
        is_asked &= is_kept
    of_rows, firsts = np.unique(rows[is_asked], return_index=True)
    parts = np.split(states, firsts[1:])  # one, of nothing, if there is no row
    return dict(zip(of_rows.tolist(), parts, strict=False))
