"""Adds drafts to steps: asks the proposer, checks what it says, and learns what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sagellm.core import DraftProposerMetrics, DraftProposerProtocol, StepInput, get_logger
from sagellm.core.plugins.failure import contained, described
from sagellm.core.protocols.step import Runs, Seat
from sagellm.engines.engine_core.draft_lengths import MAX_DRAFT, DraftLengths
from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager
from sagellm.engines.engine_core.seats import Places
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.engine_core.speculation_metrics import SpeculationMetrics
from sagellm.engines.engine_core.step_runner import DraftedRows, PlannedStep

Ints = npt.NDArray[np.int32]
logger = get_logger(__name__)

SLOW_NS, TOO_SLOW_NS = 100_000_000, 1_000_000_000
"""What the proposer may take for a step: three steps above the first, or one above the second, end it."""

MAX_TOLD = 1 << 15
"""Tokens of new sequences that the proposer is told of in one step; the first is told of in any case."""

_TOLD_NS = 2_000
"""For each of these tokens, which it may take beside."""

_MAX_SLOW, _FORGIVEN = 3, 1 / 256
"""Slow steps that end it, and by how much a step that is not slow lowers their number."""

_TIME_WEIGHT = 1 / 16
"""Of the last step in the mean time of the proposer."""


class Speculation:
    """Knows the proposer and what it was told; nobody else calls it.

    It is told of a sequence when a draft for it is first wanted, and of its tokens when the next one is. With
    a step in flight the last token is not known yet: the proposer is asked for one token more, and its first
    one stands for that. If it is another, the draft behind it is refused like any other wrong guess.

    A proposer only costs time. If it raises, is slow or proposes what cannot be, it is logged and never
    asked again.
    """

    def __init__(  # noqa: PLR0913
        self,
        proposer: DraftProposerProtocol,
        kv: KVCacheManager,
        *,
        name: str,
        now_ns: Callable[[], int],
        max_num_batched_tokens: int,
        vocab_size: int,
        is_adaptive: bool = True,
    ) -> None:
        """Create it for one engine. `name` is how messages name the proposer."""
        self.proposer, self._kv, self._seats, self._now_ns = proposer, kv, kv.seats, now_ns
        self._max_num_batched_tokens, self._vocab_size = max_num_batched_tokens, vocab_size
        num_seats = len(kv.seats.generation)
        self.lengths = DraftLengths(num_seats, is_adaptive=is_adaptive)
        self._told: Ints = np.zeros(num_seats, np.int32)  # tokens, by seat
        self._generation: Ints = np.full(num_seats, -1, np.int32)  # for which this holds
        self._name, self._failure, self._num_slow = name, "", 0.0
        self._mean_ns = 0.0  # of the proposer, for a step
        self._num_steps = self._num_drafts = self._num_tokens = self._num_accepted = self._propose_ns = 0
        self._accepted_by_place: npt.NDArray[np.int64] = np.zeros(MAX_DRAFT, np.int64)

    def with_drafts(self, planned: PlannedStep) -> PlannedStep:
        """Add drafts to decoding sequences, as far as they pay and budget, length and free blocks allow."""
        if self._failure or self.lengths.rests(len(planned.seats)):
            return planned
        table, seats = self._seats, planned.seats
        known = table.num_tokens.take(seats) + table.num_in_flight.take(seats)
        rows = np.flatnonzero((planned.num_new == 1) & (table.num_computed.take(seats) + 1 == known))
        if not len(rows):
            return planned
        budget = self._max_num_batched_tokens - planned.num_tokens
        wanted = self.lengths.wanted(seats[rows], self._mean_ns) if budget > 0 else None
        if wanted is None:
            return planned
        most = np.minimum(wanted, table.max_total.take(seats[rows]) - 1 - known[rows])
        is_asked = self._is_told_in_time(seats[rows]) & (most > 0)
        rows, most = rows[is_asked], most[is_asked]
        draft = self._ask(seats[rows], most) if len(rows) else None
        return planned if draft is None else self._reserved(planned, rows, draft, budget)

    def departed(self, sequence: Sequence, *, is_over: bool) -> None:
        """Tell the proposer that a sequence leaves its seat now, and whether its answer is complete."""
        seat = sequence.seat
        if self._failure or seat is None:
            return
        self.lengths.start(seat)
        if self._generation[seat] != self._seats.generation[seat]:
            return
        began_ns = self._now_ns()
        with contained() as failure:
            if is_over:
                self._tell(np.array([seat], np.intp))
            self.proposer.departed(seat, is_over=is_over)
        self._generation[seat] = -1
        self._note_call(self._now_ns() - began_ns, failure.error)

    def learn(self, drafted: DraftedRows) -> None:
        """Note what became of a step's drafts."""
        self.lengths.learn(drafted.seats, drafted.num_drafts, drafted.num_accepted)
        self._num_steps += 1
        self._num_drafts += len(drafted.seats)
        self._num_tokens += int(drafted.num_drafts.sum())
        self._num_accepted += int(drafted.num_accepted.sum())
        by_length = np.bincount(np.minimum(drafted.num_accepted, MAX_DRAFT), minlength=MAX_DRAFT + 1)
        self._accepted_by_place += by_length[::-1].cumsum()[::-1][1:]

    def measure(self, step: StepInput, took_ns: int) -> None:
        """Note what a step took, if it only decodes."""
        num_drafts = 0 if step.drafts is None else len(step.drafts.ids)
        if step.num_tokens == len(step.seats) + num_drafts and np.all(step.is_sampled):
            self.lengths.measure(len(step.seats), num_drafts, took_ns)

    def metrics(self) -> SpeculationMetrics:
        """Return the counts so far."""
        return SpeculationMetrics(
            proposer=self._name,
            num_steps=self._num_steps,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_tokens,
            num_accepted_tokens=self._num_accepted,
            num_accepted_by_place=self._accepted_by_place.tolist(),
            propose_ns=self._propose_ns,
            failure=self._failure,
        )

    def proposer_metrics(self) -> DraftProposerMetrics:
        """Return what the proposer counts; nothing if it fails in that."""
        with contained() as failure:
            found = self.proposer.metrics()
            if isinstance(found, DraftProposerMetrics):
                return found
        failure.error = None
        return DraftProposerMetrics()

    def _is_new(self, seats: Places) -> npt.NDArray[np.bool_]:
        """Say of which the proposer knows nothing."""
        is_new: npt.NDArray[np.bool_] = self._generation.take(seats) != self._seats.generation.take(seats)
        return is_new

    def _is_told_in_time(self, seats: Places) -> npt.NDArray[np.bool_]:
        """Say of which it knows, or is told in this step: long prompts are a step's own, and others wait."""
        is_new = self._is_new(seats)
        if not np.count_nonzero(is_new):
            return ~is_new
        ends = np.cumsum(self._seats.num_tokens.take(seats) * is_new)
        is_first = is_new & (np.cumsum(is_new) == 1)
        in_time: npt.NDArray[np.bool_] = ~is_new | is_first | (ends <= MAX_TOLD)
        return in_time

    def _ask(self, seats: Places, most: Ints) -> Runs | None:
        """Return a checked draft for each seat, behind what is in flight; None if there is none."""
        in_flight = self._seats.num_in_flight.take(seats)
        draft, began_ns = None, self._now_ns()
        num_new = 0
        with contained() as failure:
            num_new = self._tell(seats)
            asked = most + in_flight
            proposed = self.proposer.propose(seats.astype(np.int32), asked.copy())
            draft = _checked(proposed, asked, self._vocab_size)
        took_ns = self._now_ns() - began_ns
        self._mean_ns += _TIME_WEIGHT * (took_ns - self._mean_ns)
        self._note_call(took_ns, failure.error, _TOLD_NS * num_new)
        if draft is None or not len(draft.ids):
            return None
        if np.count_nonzero(in_flight):
            return _cut(draft, in_flight, np.maximum(draft.counts - in_flight, 0))
        return draft

    def _reserved(self, planned: PlannedStep, rows: Places, draft: Runs, budget: int) -> PlannedStep:
        """Add drafts to these rows of a step, as far as there are tokens and blocks for them."""
        ends = np.cumsum(draft.counts)
        counts = np.clip(budget - (ends - draft.counts), 0, draft.counts).astype(np.int32)
        given = np.flatnonzero(counts)
        if not len(given):
            return planned
        seats = planned.seats[rows[given]]
        num_tokens = self._seats.num_computed.take(seats) + 1 + counts[given]
        if without := self._kv.reserve(seats, num_tokens):
            counts[given[without]] = 0
        if not (num_ids := int(counts.sum())):
            return planned
        if len(draft.ids) != num_ids:
            draft = _cut(draft, np.zeros_like(counts), counts)
        of_all = np.zeros(len(planned.seats), np.int32)
        of_all[rows] = counts
        return PlannedStep(planned.seats, planned.num_new + of_all, Runs(draft.ids, of_all))

    def _tell(self, seats: Places) -> int:
        """Tell the proposer what it does not know of these sequences; return the tokens of the new ones."""
        table, told, num_new = self._seats, self._told, 0
        is_new = self._is_new(seats)
        if np.count_nonzero(is_new):
            for seat in seats[is_new].tolist():
                sequence: Sequence = table.sequences[seat]
                num_tokens = int(table.num_tokens[seat])
                tokens = table.tokens[seat, :num_tokens].copy()
                self.proposer.arrived(
                    Seat(seat), tokens, len(sequence.request.token_ids), sequence.request.namespace
                )
                told[seat], self._generation[seat] = num_tokens, table.generation[seat]
                num_new += num_tokens
        known, before = table.num_tokens.take(seats), told.take(seats)
        rows = np.flatnonzero(known > before)
        if not len(rows):
            return num_new
        behind, counts = seats[rows], (known - before)[rows]
        starts = np.repeat(before[rows] - (np.cumsum(counts) - counts), counts)
        ids = table.tokens[np.repeat(behind, counts), starts + np.arange(len(starts))]
        self.proposer.extended(behind.astype(np.int32), Runs(ids, counts))
        told[behind] = known[rows]
        return num_new

    def _note_call(self, took_ns: int, error: BaseException | None, allowed_ns: int = 0) -> None:
        """Note what calls took and whether they failed; end the proposer if it did, or is too slow."""
        self._propose_ns += took_ns
        took_ns -= allowed_ns
        is_slow = took_ns > SLOW_NS
        self._num_slow = self._num_slow + 1 if is_slow else max(0.0, self._num_slow - _FORGIVEN)
        if error is not None:
            self._end(described(error))
        elif took_ns > TOO_SLOW_NS or self._num_slow >= _MAX_SLOW:
            self._end(f"it took {took_ns / 1e9:.3g} s for a step; more than {SLOW_NS / 1e9:g} s is too long")

    def _end(self, reason: str) -> None:
        self._failure = reason
        logger.error("%s is not asked any more: %s; the engine goes on without drafts", self._name, reason)


def _checked(proposed: object, most: Ints, vocab_size: int) -> Runs:
    """Return a copy of drafts. Raises ValueError unless they are tokens, at most so many for each row."""
    if not isinstance(proposed, Runs):
        raise ValueError(f"propose returned {type(proposed).__name__}; it must return Runs")
    for name, values in (("ids", proposed.ids), ("counts", proposed.counts)):
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(f"{name} of its drafts is not an array (n,) of integers")
    counts, ids = proposed.counts, proposed.ids
    if len(counts) != len(most):
        raise ValueError(f"it proposed {len(counts)} drafts for {len(most)} rows")
    if np.count_nonzero((counts < 0) | (counts > most)):
        row = int(np.flatnonzero((counts < 0) | (counts > most))[0])
        raise ValueError(f"a draft has {counts[row]} tokens; at most {most[row]} were wanted")
    if int(counts.sum()) != len(ids):
        raise ValueError(f"its drafts have {len(ids)} tokens, and counts of {int(counts.sum())} in all")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"a draft has the tokens {ids.min()} … {ids.max()}; there are {vocab_size}")
    return Runs(ids.astype(np.int32), counts.astype(np.int32))


def _cut(draft: Runs, starts: Ints, counts: Ints) -> Runs:
    """Return `counts` tokens of each run, from its token `starts` on."""
    within = np.arange(len(draft.ids)) - np.repeat(np.cumsum(draft.counts) - draft.counts, draft.counts)
    begins, ends = np.repeat(starts, draft.counts), np.repeat(starts + counts, draft.counts)
    return Runs(draft.ids[(within >= begins) & (within < ends)], counts)
