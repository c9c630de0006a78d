"""The masks of a step: which tokens the grammars of its sequences allow at each sampled position."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

import numpy as np
import numpy.typing as npt

from sagellm.core import Clock, EngineError, StepInput, StepOutput
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.step import TokenMasks
from sagellm.engines.engine_core.preparing import SequenceGrammar
from sagellm.engines.engine_core.seats import Seats

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_MAX_MASK_NS = 250_000_000
"""A sequence ends if one of its masks takes longer: the next one would, too."""


class GrammarMasks:
    """Makes the masks of steps, and moves the grammars of sequences by the tokens that are committed.

    A state moves only by committed tokens: drafts are walked and undone, so that rows may be submitted again.
    A grammar that fails ends its sequence when the step is committed. `count` is told of the masks of a step
    and the nanoseconds they took.
    """

    def __init__(
        self, seats: Seats, vocab_size: int, clock: Clock, count: Callable[[int, int], None]
    ) -> None:
        self._seats, self._clock, self._count = seats, clock, count
        self._num_words = -(-vocab_size // 32)

    def late_rows(self, step: StepInput) -> Bools | None:
        """Return which rows need a token in flight before their masks can be made; None if none does."""
        table = self._seats
        is_late = step.is_sampled & (table.num_in_flight.take(step.seats) > 0)
        is_late &= np.isin(step.seats, list(table.structured))
        return is_late if is_late.any() else None

    def masks_of(self, step: StepInput, is_asked: Bools) -> TokenMasks | None:
        """Return the masks of the sampled rows among these whose sequences have a grammar."""
        table = self._seats
        rows = [row for row, seat in enumerate(step.seats.tolist()) if seat in table.structured]
        rows = [row for row in rows if is_asked[row] and step.is_sampled[row]]
        if not rows:
            return None
        started_ns = self._clock.now_ns()
        num_drafts = np.zeros(len(step.seats), np.int32) if step.drafts is None else step.drafts.counts
        num_positions = step.is_sampled * (1 + num_drafts)
        firsts = np.cumsum(num_positions) - num_positions
        places = np.cumsum(num_drafts) - num_drafts
        words = np.zeros((int(num_positions[rows].sum()), self._num_words), np.uint32)
        positions: list[int] = []
        for row in rows:
            begin, seat = int(places[row]), int(step.seats[row])
            drafts = [] if step.drafts is None else step.drafts.ids[begin : begin + num_drafts[row]].tolist()
            sequence = table.sequences[seat]
            grammar: SequenceGrammar = sequence.grammar
            num_output = int(table.num_tokens[seat] - table.num_prompt[seat])
            begun_ns = self._clock.now_ns()
            with contained() as failure:
                masked = _walk(grammar, drafts, words[len(positions) :], num_output, sequence.stop_token_ids)
                positions += [int(firsts[row]) + place for place in masked]
            if failure.error is not None:
                grammar.error, failure.error = failure.error, None
            elif (took_ns := self._clock.now_ns() - begun_ns) > _MAX_MASK_NS * (1 + len(drafts)):
                grammar.error = EngineError(
                    f"a mask of the structured output took {took_ns / 1e6:.0f} ms; give a simpler one"
                )
        self._count(len(positions), self._clock.now_ns() - started_ns)
        if not positions:
            return None
        return TokenMasks(np.array(positions, np.int32), words[: len(positions)])

    def advance(self, step: StepInput, output: StepOutput, is_live: Bools) -> dict[int, BaseException]:
        """Move the grammars of a step's live rows by its tokens; return the rows whose grammars fail.

        The state of such a row is as before, or unknown and its sequence must end.
        """
        table, errors = self._seats, {}
        ends = np.cumsum(output.tokens.counts)
        for row, seat in enumerate(step.seats.tolist()):
            if seat not in table.structured or not is_live[row] or row in output.errors:
                continue
            end, count = int(ends[row]), int(output.tokens.counts[row])
            grammar: SequenceGrammar = table.sequences[seat].grammar
            error = grammar.error or _take(grammar, output.tokens.ids[end - count : end].tolist())
            if error is not None:
                errors[row] = error
        return errors


def _take(grammar: SequenceGrammar, token_ids: list[int]) -> BaseException | None:
    """Append committed tokens to a grammar's state; return why one may not follow, or how it failed."""
    with contained() as failure:
        num_taken = grammar.provider.advance(grammar.state, token_ids)
        if num_taken < len(token_ids):
            grammar.provider.rollback(grammar.state, num_taken)
            raise EngineError(
                f"token {token_ids[num_taken]} was drawn, which the structured output does not allow there"
            )
    return failure.error


def _walk(
    grammar: SequenceGrammar,
    drafts: Seq[int],
    words: npt.NDArray[np.uint32],
    num_output: int,
    stop_token_ids: frozenset[int],
) -> list[int]:
    """Write the masks after each draft that may follow into the rows of `words`, one after another.

    Returns which of the positions have one. What comes after a refused draft is never kept.
    """
    provider, state = grammar.provider, grammar.state
    masked: list[int] = []
    num_walked = 0
    try:
        for place in range(len(drafts) + 1):
            row = words[len(masked)]
            is_masked = provider.mask(state, row)
            if num_output + place < grammar.min_tokens:
                if not is_masked:
                    row[:] = 0xFFFFFFFF
                is_masked = _without_stops(row, stop_token_ids) or is_masked
            if is_masked:
                masked.append(place)
            if place == len(drafts) or not provider.advance(state, drafts[place : place + 1]):
                break
            num_walked += 1
    finally:
        if num_walked:
            provider.rollback(state, num_walked)
    return masked


def _without_stops(row: npt.NDArray[np.uint32], stop_token_ids: frozenset[int]) -> bool:
    """Take stop tokens out of a mask, unless nothing else may follow; say whether they were taken out."""
    words = [token_id // 32 for token_id in stop_token_ids]
    kept = row[words].copy()
    for token_id in stop_token_ids:
        row[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if row.any():
        return True
    row[words] = kept
    return False
