"""Steps in flight: submitted to the executor, collected, and applied to the seats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import BlockId, Clock, ExecutorProtocol, StepInput, StepOutput
from sagellm.core.protocols.engine import PromptScores, SampledToken
from sagellm.core.protocols.step import (
    CopyBlocks,
    HostBuffers,
    KVOp,
    ReadBlocks,
    Runs,
    Scored,
    Seat,
    TokenMasks,
    WriteBlocks,
    verify_output,
)
from sagellm.engines.engine_core.seats import Places, Seats
from sagellm.engines.engine_core.token_masks import GrammarMasks

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
_NO_SEATS: Ints = np.empty(0, np.int32)


class PlannedStep(NamedTuple):
    """What the scheduler wants computed: a number of tokens per seat, which already has blocks for them."""

    seats: Places
    num_new: Ints  # drafts included
    drafts: Runs | None = None
    num_steps: int = 1  # in a row, all alike

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return int(self.num_new.sum())


class DraftedRows(NamedTuple):
    """The rows of a result that had drafts."""

    rows: Places  # rising
    seats: Places
    num_drafts: Ints  # tokens, at least 1
    num_accepted: Ints  # of them, up to the end of the sequence

    def counts_of(self, row: int) -> tuple[int, int]:
        """Return the draft tokens of a row of the result, and how many of them were accepted."""
        place = int(np.searchsorted(self.rows, row))
        if place == len(self.rows) or self.rows[place] != row:
            return 0, 0
        return int(self.num_drafts[place]), int(self.num_accepted[place])


@dataclass(slots=True, kw_only=True, eq=False)
class StepResult:
    """What a collected step did to sequences that still have their seats. Tokens end at the first stop."""

    seats: Places  # (rows,)
    tokens: Runs  # of the rows
    is_first: Bools  # (rows,) whether these are the first tokens of its output
    is_over: Bools  # (rows,) whether the last of these tokens ends it
    drafted: DraftedRows | None = None
    logprobs: Mapping[Seat, Seq[SampledToken]] = field(default_factory=dict)  # of those tokens
    scores: Mapping[Seat, PromptScores] = field(default_factory=dict)
    hidden_states: Mapping[Seat, Floats] = field(default_factory=dict)  # (tokens, hidden_size) of each seat
    errors: Mapping[Seat, BaseException] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Flight:
    """A submitted step. Its rows belong to the sequences that had the seats then, told by generation."""

    step: StepInput
    generations: Ints
    submitted_ns: int
    output: StepOutput | None = None  # received, but not yet applied
    awaits_masks: bool = False  # which need tokens of the step before


class StepRunner:
    """Submits steps to the executor and applies the results to the seats.

    Counts are optimistic: a submitted step counts as computed, and each sampled row as one more token.
    Collecting corrects them. Results still in flight when a sequence leaves its seat are dropped.

    An executor reports a failure for all rows of a step. Later steps in flight are collected first; then the
    rows are resubmitted in halves until the failing one is alone. This is sound because KV writes are
    idempotent, random numbers are keyed by seed and position, and logits processors keep no state between
    steps. What later steps computed from a failed one is dropped and planned again.
    """

    def __init__(  # noqa: PLR0913
        self,
        executor: ExecutorProtocol,
        seats: Seats,
        clock: Clock,
        *,
        label: str,
        vocab_size: int,
        buffers: HostBuffers | None = None,
        masks: GrammarMasks | None = None,
    ) -> None:
        """Create a runner. `label` is how errors name the executor; the workers know the same buffers.

        Without `masks` no sequence has a grammar.
        """
        self._executor = executor
        self._label, self._vocab_size = label, vocab_size
        self._buffers = HostBuffers() if buffers is None else buffers
        self._seats, self._masks = seats, masks
        self._clock = clock
        self._flights: deque[_Flight] = deque()
        self._lost: set[int] = set()  # steps that failed in the executor; their outputs may still come
        self._num_steps = 0
        self.last_ns: Seq[int] = (0,)  # from a step's submission, or the previous end, to its end
        self._ended_ns = 0
        self._last: StepInput | None = None

    def take_last(self) -> StepInput | None:
        """Return the step collected last; None if it was already taken."""
        step, self._last = self._last, None
        return step

    @property
    def num_in_flight(self) -> int:
        """Steps that are submitted but not yet collected."""
        return len(self._flights)

    @property
    def depth(self) -> int:
        """Steps that may stay in flight while the next one is planned."""
        return self._executor.depth

    def submit(self, planned: PlannedStep, kv_ops: Seq[KVOp]) -> None:
        """Submit a step, with all that changed in the seats since the last one.

        If that fails, the changes are lost, and all sequences must end.
        """
        seats, table = planned.seats, self._seats
        starts = table.num_computed.take(seats)
        stops = starts + planned.num_new
        is_sampled = stops >= (table.num_tokens + table.num_in_flight).take(seats)
        self._num_steps += 1
        step = StepInput(
            step=self._num_steps,
            seats=seats.astype(np.int32),
            num_new=planned.num_new,
            starts=starts,
            is_sampled=is_sampled,
            kv_ops=kv_ops,
            arrivals=table.take_arrivals(),
            departures=table.take_departures(),
            new_blocks=table.take_block_updates(),
            drafts=planned.drafts,
            scored=self._scored(seats, starts, planned.num_new) if table.scored else (),
            hidden_rows=self._hidden_rows(seats, is_sampled) if table.with_hidden else None,
            num_steps=planned.num_steps,
        )
        if table.structured:
            step = self._with_masks(step)
        self._submit(step)
        table.num_computed[seats] = stops
        table.num_in_flight[seats] += is_sampled
        if planned.drafts is not None:
            table.is_held[seats] = planned.drafts.counts > 0

    def carry_out(self, kv_ops: Seq[KVOp]) -> None:
        """Copy, read or write KV now.

        Blocks that are read were written by steps that are collected, or by such operations. Unless the
        executor transfers KV beside them, steps in flight are received first and kept for the next `collect`.
        What has changed in the seats is left to the next step that computes: if this one fails, it is lost.
        """
        self._num_steps += 1
        step = StepInput(
            step=self._num_steps,
            seats=_NO_SEATS,
            num_new=_NO_SEATS,
            starts=_NO_SEATS,
            is_sampled=_NO_SEATS > 0,
            kv_ops=kv_ops,
        )
        if self._executor.transfer(step):
            return
        self._submit(step)
        for flight in list(self._flights):
            self._receive(flight)
        self._flights.pop()

    def copy_blocks(self, pairs: Seq[tuple[BlockId, BlockId]]) -> None:
        """Copy the KV of the first block of each pair to the second, one pair after the other."""
        if pairs:
            self.carry_out([CopyBlocks(pairs)])

    def read_blocks(self, block_ids: Seq[BlockId], into: Seq[memoryview]) -> None:
        """Copy the KV of blocks to host memory."""
        lent = self._buffers.lend(into)
        try:
            self.carry_out([ReadBlocks(block_ids, lent)])
        finally:
            self._buffers.take_back(lent)

    def write_blocks(self, block_ids: Seq[BlockId], data: Seq[memoryview]) -> None:
        """Write data from `read_blocks` into blocks."""
        lent = self._buffers.lend(data)
        try:
            self.carry_out([WriteBlocks(block_ids, lent)])
        finally:
            self._buffers.take_back(lent)

    def collect(self, num_left: int) -> Iterator[StepResult]:
        """Collect steps until only `num_left` are in flight; yield their results.

        Sequences that a result ends must leave their seats before the next result is requested. Raises
        EngineError for a failure that belongs to no sequence.
        """
        while len(self._flights) > num_left:
            flight = self._flights[0]
            output = self._receive(flight)
            self._flights.popleft()
            yield from self._take_in(flight, output)

    def _submit(self, step: StepInput) -> None:
        self._flights.append(self._flight(step, self._seats.generation.take(step.seats)))
        try:
            self._executor.submit(step)
        except BaseException:
            self._flights.pop()
            self._lost.add(step.step)
            raise

    def _flight(self, step: StepInput, generations: Ints) -> _Flight:
        return _Flight(step, generations, self._clock.now_ns(), awaits_masks=step.late_masks is not None)

    def _with_masks(self, step: StepInput) -> StepInput:
        """Return a step with the masks that can be made now, and the rows whose masks follow."""
        assert self._masks is not None, "sequences have grammars"
        late = self._masks.late_rows(step)
        now = np.ones(len(step.seats), np.bool_) if late is None else ~late
        return replace(step, masks=self._masks.masks_of(step, now), late_masks=late)

    def _send_masks(self, flight: _Flight) -> None:
        """Send the masks that a step waits for: the step before it is committed, or its rows are lost."""
        if not flight.awaits_masks:
            return
        flight.awaits_masks = False
        step = flight.step
        assert self._masks is not None, "sequences have grammars"
        assert step.late_masks is not None, "it has late masks"
        is_live = self._seats.generation.take(step.seats) == flight.generations
        masks = self._masks.masks_of(step, step.late_masks & is_live)
        if masks is None:
            masks = TokenMasks(_NO_SEATS, np.empty((0, 0), np.uint32))
        self._executor.submit_masks(step.step, masks)

    def _receive(self, flight: _Flight) -> StepOutput:
        """Return a step's output, the oldest that the executor has; drop the step if that fails.

        Raises EngineError, which names the executor, for an output that does not answer the step.
        """
        if flight.output is None:
            self._send_masks(flight)
            output = None
            try:
                output = self._executor.collect()
                while getattr(output, "step", None) in self._lost:
                    output = self._executor.collect()
                verify_output(self._label, flight.step, output, vocab_size=self._vocab_size)
            except BaseException:
                self._lost.add(flight.step.step)
                gone = flight.step.step, getattr(output, "step", None)  # the latter was delivered too early
                self._flights = deque(each for each in self._flights if each.step.step not in gone)
                raise
            if self._lost:  # outputs come in order: those of earlier steps no longer come
                self._lost = {number for number in self._lost if number > output.step}
            flight.output = output
            ended_ns = self._clock.now_ns()
            self.last_ns = output.took_ns or (ended_ns - max(flight.submitted_ns, self._ended_ns),)
            self._last = flight.step
            self._ended_ns = ended_ns
        return flight.output

    def _take_in(self, flight: _Flight, output: StepOutput) -> Iterator[StepResult]:
        step = flight.step
        is_live = self._seats.generation.take(step.seats) == flight.generations
        if self._seats.structured and self._masks is not None:
            refused = self._masks.advance(step, output, is_live)
            if refused:
                output = replace(output, errors={**output.errors, **refused})
        is_bad = np.zeros(len(step.seats), np.bool_)
        if output.errors:
            is_bad[list(output.errors)] = True
        result = self._commit(step, output, is_live & ~is_bad)
        if self._flights:
            self._send_masks(self._flights[0])
        yield result
        if not output.errors:
            return
        rows = np.flatnonzero(is_live & is_bad)
        if len(rows) == 1:
            yield _failed(Seat(int(step.seats[rows[0]])), output.errors[int(rows[0])])
        elif len(rows):
            yield from self._halve(flight, rows)

    def _halve(self, flight: _Flight, rows: npt.NDArray[np.intp]) -> Iterator[StepResult]:
        """Recompute failed rows in halves, after collecting everything in flight."""
        later = [(each, self._receive(each)) for each in list(self._flights)]
        self._flights.clear()
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            step = _rows_of(flight.step, half)
            if self._masks is not None and self._seats.structured:
                step = replace(step, masks=self._masks.masks_of(step, step.is_sampled))
            again = self._flight(step, flight.generations[half])
            self._executor.submit(again.step)
            yield from self._take_in(again, self._receive(again))
        for each, output in later:
            self._drop(each, flight.step.seats[rows])
            yield from self._take_in(each, output)

    def _drop(self, flight: _Flight, seats: Ints) -> None:
        """Undo what a step counted for these seats, and ignore their rows from now on."""
        step, table = flight.step, self._seats
        is_dropped = np.isin(step.seats, seats) & (table.generation[step.seats] == flight.generations)
        dropped = step.seats[is_dropped]
        table.num_computed[dropped] -= step.num_new[is_dropped]
        table.num_in_flight[dropped] -= step.is_sampled[is_dropped]
        table.is_held[dropped] = False
        flight.generations = np.where(is_dropped, -1, flight.generations)

    def _commit(self, step: StepInput, output: StepOutput, is_live: Bools) -> StepResult:
        """Correct the counts of a step's live rows and append their tokens, up to the first that ends one."""
        if np.count_nonzero(is_live) < len(is_live):
            rows = np.flatnonzero(is_live)
            step, output = _rows_of(step, rows), _outputs_of(output, rows)
        table, seats = self._seats, step.seats.astype(np.intp)  # or each use would convert them
        before = table.num_tokens.take(seats)
        runs, is_over = self._append(seats, before, output.tokens)
        table.num_tokens[seats] = after = before + runs.counts
        table.num_in_flight[seats] -= step.is_sampled
        computed = step.starts + step.num_new
        is_first = before == table.num_prompt.take(seats)
        if len(runs.ids) != len(seats) or step.drafts is not None:
            is_first &= after > before
        drafted = None
        if step.drafts is not None:
            num_refused = step.drafts.counts - output.num_accepted
            computed = np.minimum(computed - num_refused, after - 1)  # a run may have been truncated
            table.num_computed[seats] -= num_refused
            table.is_held[seats] = False
            rows = np.flatnonzero(step.drafts.counts)
            num_accepted = np.minimum(output.num_accepted, runs.counts)[rows]
            drafted = DraftedRows(rows, seats[rows], step.drafts.counts[rows], num_accepted)
        table.num_committed[seats] = computed
        return StepResult(
            seats=seats,
            tokens=runs,
            is_first=is_first,
            is_over=is_over,
            drafted=drafted,
            logprobs={
                Seat(int(seats[row])): tokens[: runs.counts[row]] for row, tokens in output.logprobs.items()
            },
            scores={Seat(int(seats[row])): scores for row, scores in output.scores.items()},
            hidden_states={
                Seat(int(seats[row])): states[: runs.counts[row]]
                for row, states in output.hidden_states.items()
            },
        )

    def _append(self, seats: Places, before: Ints, runs: Runs) -> tuple[Runs, Bools]:
        """Append runs of tokens, each up to the first that ends its sequence; return what was appended."""
        table, ids, counts = self._seats, runs.ids, runs.counts
        is_single = len(ids) == len(seats) == np.count_nonzero(counts)
        seat_of, position = seats, before
        if not is_single:
            row_of = np.repeat(np.arange(len(seats)), counts)
            within = np.arange(len(ids)) - (np.cumsum(counts) - counts)[row_of]
            seat_of, position = seats[row_of], before[row_of] + within
        is_end = position >= table.max_computed.take(seat_of)
        is_stop = table.stops.take(seat_of, 0) == ids[:, None]
        if np.count_nonzero(is_stop):
            is_end |= is_stop.any(1) & (position >= table.min_total[seat_of])
        if table.with_many_stops:
            for index, seat in enumerate(seat_of.tolist()):
                if seat in table.with_many_stops and position[index] >= table.min_total[seat]:
                    is_end[index] |= int(ids[index]) in table.sequences[seat].stop_token_ids
        if is_single:
            table.tokens[seats, before] = ids
            return runs, is_end
        is_over = np.zeros(len(seats), np.bool_)
        if np.count_nonzero(is_end):
            ended, first = np.unique(row_of[is_end], return_index=True)
            is_over[ended] = True
            counts = counts.copy()
            counts[ended] = within[is_end][first] + 1
            is_kept = within < counts[row_of]
            ids, seat_of, position = ids[is_kept], seat_of[is_kept], position[is_kept]
        table.tokens[seat_of, position] = ids
        return Runs(ids, counts), is_over

    def _hidden_rows(self, seats: Places, is_sampled: Bools) -> Bools | None:
        """Return which sampled rows want hidden states; None: none."""
        is_wanted: Bools = np.isin(seats, list(self._seats.with_hidden)) & is_sampled
        return is_wanted if np.count_nonzero(is_wanted) else None

    def _scored(self, seats: Places, starts: Ints, num_new: Ints) -> list[Scored]:
        scored = []
        for row, seat in enumerate(seats.tolist()):
            if seat not in self._seats.scored:
                continue
            sequence = self._seats.sequences[seat]
            start = max(int(starts[row]), sequence.num_scored)
            stop = min(int(starts[row] + num_new[row]), sequence.num_to_score)
            if start < stop:
                scored.append(Scored(row, start, stop, sequence.params.prompt_logprobs or 0))
        return scored


def _failed(seat: Seat, error: BaseException) -> StepResult:
    seats, none = np.zeros(0, np.intp), np.zeros(0, np.bool_)
    nothing = Runs(_NO_SEATS, _NO_SEATS)
    return StepResult(seats=seats, tokens=nothing, is_first=none, is_over=none, errors={seat: error})


def _rows_of(step: StepInput, rows: npt.NDArray[np.intp]) -> StepInput:
    """Return the same step for some of its rows, without what a worker has already applied."""
    place = {row: index for index, row in enumerate(rows.tolist())}
    return replace(
        step,
        seats=step.seats[rows],
        num_new=step.num_new[rows],
        starts=step.starts[rows],
        is_sampled=step.is_sampled[rows],
        arrivals=(),
        departures=(),
        new_blocks=None,
        kv_ops=(),
        drafts=None if step.drafts is None else _runs_of(step.drafts, rows),
        masks=None,
        late_masks=None,
        scored=[replace(each, row=place[each.row]) for each in step.scored if each.row in place],
        hidden_rows=None if step.hidden_rows is None else step.hidden_rows[rows],
    )


def _outputs_of(output: StepOutput, rows: npt.NDArray[np.intp]) -> StepOutput:
    place = {row: index for index, row in enumerate(rows.tolist())}
    return StepOutput(
        step=output.step,
        tokens=_runs_of(output.tokens, rows),
        num_accepted=output.num_accepted[rows],
        logprobs={place[row]: tokens for row, tokens in output.logprobs.items() if row in place},
        scores={place[row]: scores for row, scores in output.scores.items() if row in place},
        hidden_states={place[row]: states for row, states in output.hidden_states.items() if row in place},
    )


def _runs_of(runs: Runs, rows: npt.NDArray[np.intp]) -> Runs:
    is_kept = np.zeros(len(runs.counts), np.bool_)
    is_kept[rows] = True
    return Runs(runs.ids[np.repeat(is_kept, runs.counts)], runs.counts[rows])
