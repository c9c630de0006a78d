"""Tokens that a kernel draws on a device; they stay there, where the next step takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.accel.uploads import send
from sagellm.core import EngineError, StepInput, StepOutput
from sagellm.core.protocols.engine import PromptScores, SampledToken
from sagellm.core.protocols.step import TokenMasks
from sagellm.engines.sampling.draws import DeviceDraw, Logits
from sagellm.engines.sampling.logprobs import with_logprobs
from sagellm.engines.sampling.random import numbers_of
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.worker.device_changes import DeviceCounts, PenalisedRow, PlannedChanges
from sagellm.engines.worker.host_tokens import Hidden, Ids, LaunchedStep, StepDraws, output_of
from sagellm.engines.worker.masks import Words, masks_at
from sagellm.engines.worker.sampled import Ints, Places, Sampled, sampled_positions
from sagellm.engines.worker.seat_draws import RowSettings, SeatDraws, Seats
from sagellm.engines.worker.seat_state import SeatState


class _Part(NamedTuple):
    """Tokens of some positions, on their way to the host."""

    which: Places | None  # None: all positions
    tokens: torch.Tensor  # (positions,) int64
    reported: Places  # of the step, with log-probabilities
    num_top: Ints  # (reported,)
    logprobs: torch.Tensor | None  # (reported, columns)
    arrived: torch.cuda.Event | None


@dataclass(slots=True, eq=False)
class LateStep(LaunchedStep):
    """A step whose tokens are on their way to the host."""

    generations: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # of positions
    parts: list[_Part] = field(default_factory=list)


class LateTokens(StepDraws):
    """Draws whole steps on the device, and keeps the last token of each seat there.

    Masks, penalties, edits and log-probabilities are computed there too. Only a logits processor that needs
    the output on the host waits for the steps in flight.
    """

    def __init__(self, draw: DeviceDraw, sampler: Sampler, draws: SeatDraws, state: SeatState) -> None:
        self._draw, self._sampler, self._draws, self._state = draw, sampler, draws, state
        num_seats = len(state.generation)
        self._last: torch.Tensor | None = None  # (seats,) int64
        self._counts: DeviceCounts | None = None
        self._step_of = np.zeros(num_seats, np.int64)  # that draws a token the host does not have; 0: none
        self._generation = np.full(num_seats, -1, np.int64)  # for which this holds
        self._in_flight: deque[LateStep] = deque()

    def fill_in(self, step: StepInput, input_ids: Ids) -> None:
        """Write the tokens that the host does not have yet into a step's input (tokens,)."""
        rows = np.flatnonzero(self._is_late(step.seats)) if self._in_flight else ()
        if not len(rows):
            return
        assert self._last is not None, "a token in flight is on the device"
        assert isinstance(input_ids, torch.Tensor), "arrays are drawn from on the host"
        # A row whose last token is in flight computes that token first, and then its drafts.
        firsts = np.cumsum(step.num_new, dtype=np.int64) - step.num_new
        placed = np.stack((firsts[rows], step.seats[rows].astype(np.int64)))
        places, seats = send(placed, input_ids.device)
        input_ids.index_copy_(0, places, self._last.index_select(0, seats))

    def _is_late(self, seats: Seats) -> npt.NDArray[np.bool_]:
        is_theirs: npt.NDArray[np.bool_] = self._generation[seats] == self._state.generation[seats]
        return is_theirs & (self._step_of[seats] > 0)

    def launch(
        self,
        step: StepInput,
        logits: Logits,
        scores: Mapping[int, PromptScores],
        hidden: Hidden | None,
    ) -> LateStep:
        """Draw the rows that do not wait for masks, for the next step and, later, for the host.

        The logits may be changed in place.
        """
        assert isinstance(logits, torch.Tensor), "arrays are drawn from on the host"
        if self._last is None:
            self._last = torch.zeros(len(self._step_of), dtype=torch.int64, device=logits.device)
        sampled = sampled_positions(step)
        generations = self._state.generation[sampled.seats]
        if isinstance(hidden, torch.Tensor) and hidden.is_cuda:
            hidden = _to_host(hidden)  # it has arrived when the tokens have, which are sent later
        launched = LateStep(step, sampled, scores, hidden, generations=generations)
        if step.late_masks is None:
            self._draw_some(launched, None, logits, step.masks)
        else:
            is_late = step.late_masks[sampled.rows]
            launched.logits, launched.waiting = logits, is_late.nonzero()[0]
            self._draw_some(launched, (~is_late).nonzero()[0], logits, step.masks)
        self._in_flight.append(launched)
        return launched

    def add_masks(self, launched: LaunchedStep, masks: TokenMasks) -> None:
        """Draw the rows that waited."""
        assert isinstance(launched, LateStep), "it launched the step"
        assert isinstance(launched.logits, torch.Tensor), "logits stay while rows wait"
        self._draw_some(launched, launched.waiting, launched.logits, masks)
        launched.waiting = launched.logits = None

    def finish(self, launched: LaunchedStep) -> StepOutput:
        """Wait for a step's tokens, and write them into the seats that their sequences still have."""
        assert isinstance(launched, LateStep), "it launched the step"
        if launched in self._in_flight:
            self._in_flight.remove(launched)
        self._step_of[self._step_of == launched.step.step] = 0
        if launched.waiting is not None:
            raise EngineError(f"step {launched.step.step} is collected before the masks that it waits for")
        if launched.output is None:
            launched.output = self._output(launched)
        return launched.output

    def _settle(self) -> None:
        """Wait for all steps in flight, so that the host has every token."""
        for launched in [each for each in self._in_flight if each.waiting is None]:
            self.finish(launched)

    def _draw_some(
        self, launched: LateStep, which: Places | None, logits: torch.Tensor, masks: TokenMasks | None
    ) -> None:
        num_positions = len(launched.sampled.seats)
        if not num_positions or (which is not None and not len(which)):
            return
        found = masks_at(masks, which, num_positions, logits.shape[1])
        sampled = launched.sampled if which is None else launched.sampled.take(which)
        self._draws.learn(sampled.seats)
        if which is None:
            logits = logits[:num_positions].float().contiguous()
        else:
            logits = logits.index_select(0, send(which, logits.device)).float()
        device, num_top = logits.device, self._draws.num_top.take(sampled.seats)
        reported = (num_top >= 0).nonzero()[0]
        given, of_given = logits, reported
        if found or np.count_nonzero(self._draws.changes_logits[sampled.seats]):
            if len(reported):
                given, of_given = logits.index_select(0, send(reported, device)), np.arange(len(reported))
            with torch.inference_mode():  # as the forward pass, whose logits are changed
                self._change(logits, sampled, found)
        settings = _with_numbers(self._draws.settings(sampled.seats, sampled.places), logits.shape[1])
        tokens = self._draw(logits, send(settings, device))
        columns = None
        if len(reported):
            most = min(int(num_top.max()), logits.shape[1])
            rows = send(np.stack((of_given, reported)), device)
            columns = self._draw.logprobs(given, tokens, rows, most)
        places = reported if which is None else which[reported]
        launched.parts.append(_part(which, tokens, places, num_top[reported], columns))
        self._remember(launched.step.step, sampled, tokens)  # last: a step that fails is not waited for

    def _change(self, logits: torch.Tensor, sampled: Sampled, masks: dict[int, Words]) -> None:
        with_plugins = self._draws.has_plugins[sampled.seats].nonzero()[0]
        if np.count_nonzero(self._draws.needs_output[sampled.seats]):
            self._settle()
        if len(with_plugins):
            rows = self._draws.rows(sampled.take(with_plugins), {})
            changed = self._sampler.changed(logits, with_plugins.tolist(), rows)
            logits.index_copy_(0, send(with_plugins, logits.device), changed)
        changes = PlannedChanges()
        self._penalise(changes, logits, sampled)
        for place in self._draws.with_changes(sampled.seats):
            seat = int(sampled.seats[place])
            if (sparse := self._draws.sparse[seat]) is not None:
                changes.edit(place, sparse.edits(self._draws.output(seat, int(sampled.places[place]))))
                if sparse.mask is not None:
                    masks[place] = masks[place] & sparse.mask if place in masks else sparse.mask
        if changes.is_empty and not masks:
            return
        counts = logits.new_empty(1, 1, dtype=torch.int32) if self._counts is None else self._counts.counts
        self._draw.change(logits, changes.upload(masks, counts, logits.shape[1]))

    def _penalise(self, changes: PlannedChanges, logits: torch.Tensor, sampled: Sampled) -> None:
        """Plan the penalties that no logits processor has made already."""
        draws, seats = self._draws, sampled.seats
        places = (draws.has_penalties & ~draws.has_plugins)[seats].nonzero()[0].tolist()
        if not places:
            return
        if self._counts is None:
            self._counts = DeviceCounts(self._draw, logits.device, logits.shape[1])
        is_late = self._is_late(seats)
        rows = [self._penalised(sampled, place, is_late=bool(is_late[place])) for place in places]
        assert self._last is not None, "it is made before the first draw"
        for row, counts_row in zip(rows, self._counts.count(rows, self._last), strict=True):
            changes.penalise(row, counts_row)

    def _penalised(self, sampled: Sampled, place: int, *, is_late: bool) -> PenalisedRow:
        seat, within = int(sampled.seats[place]), 0 if sampled.within is None else int(sampled.within[place])
        arrival = self._state[seat]
        return PenalisedRow(
            row=place,
            seat=seat,
            generation=int(self._state.generation[seat]),
            params=arrival.params,
            prompt_token_ids=arrival.token_ids[: arrival.num_prompt],
            output_token_ids=self._draws.output(seat, int(sampled.places[place]) - within - is_late),
            has_late_token=is_late,
            drafts=sampled.drafts_from(place - within)[:within],
        )

    def _remember(self, step: int, sampled: Sampled, tokens: torch.Tensor) -> None:
        """Keep the tokens for the next step: of rows without drafts, as others are known when it comes."""
        seats = sampled.seats
        if sampled.drafts is not None and sampled.within is not None:
            # A seat that is named more than once, or has a draft, is not planned before it is collected.
            _, index, counts = np.unique(seats, return_index=True, return_counts=True)
            alone = np.sort(index[counts == 1])
            tokens, seats = tokens.index_select(0, send(alone, tokens.device)), seats[alone]
        assert self._last is not None, "it is made before the first draw"
        places = send(seats.astype(np.int64), tokens.device)
        self._last.index_copy_(0, places, tokens.clamp(min=0))
        self._step_of[seats], self._generation[seats] = step, self._state.generation[seats]

    def _output(self, launched: LateStep) -> StepOutput:
        sampled = launched.sampled
        ids = np.full(len(sampled.seats), -1, np.int32)
        for part in launched.parts:
            if part.arrived is not None:
                part.arrived.synchronize()
            ids[slice(None) if part.which is None else part.which] = part.tokens.numpy()
        is_theirs = self._state.generation[sampled.seats] == launched.generations
        is_kept = sampled.kept(ids)
        output = output_of(launched, ids, is_kept, _logprobs(launched, ids))
        if not output.errors:
            is_written = is_theirs if is_kept is None else is_theirs & is_kept
            sampled.write(self._state.tokens, ids, is_written)
        return output


def _logprobs(launched: LateStep, ids: Ints) -> dict[int, SampledToken]:
    found: dict[int, SampledToken] = {}
    for part in launched.parts:
        if part.logprobs is None:
            continue
        rows = zip(part.reported.tolist(), part.num_top.tolist(), part.logprobs.numpy(), strict=True)
        for place, num_top, columns in rows:
            if ids[place] >= 0:
                found[place] = with_logprobs(int(ids[place]), columns, num_top)
    return found


def _part(
    which: Places | None,
    tokens: torch.Tensor,
    reported: Places,
    num_top: Ints,
    columns: torch.Tensor | None,
) -> _Part:
    """Send tokens to the host."""
    if tokens.device.type != "cuda":
        return _Part(which, tokens, reported, num_top, columns, None)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    device = tokens.device
    tokens, columns = _to_host(tokens), None if columns is None else _to_host(columns)
    arrived.record(torch.cuda.current_stream(device))
    return _Part(which, tokens, reported, num_top, columns, arrived)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _with_numbers(settings: RowSettings, vocab_size: int) -> npt.NDArray[np.float64]:
    filters = settings.filters
    filters[filters[:, 2] >= vocab_size, 2] = 0.0
    random = np.flatnonzero(filters[:, 0] > 0.0)
    if len(random):
        filters[random, 4] = numbers_of(settings.keys[random], settings.positions[random])
    return filters
