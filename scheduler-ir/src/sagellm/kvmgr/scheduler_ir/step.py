"""The plan of one step, from rows and decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sagellm.core.protocols.scheduler_ir import (
    Admission,
    DeferredReason,
    ScheduleIR,
    SchedulePlan,
)
from sagellm.core.unchecked import unchecked
from sagellm.kvmgr.scheduler_ir.hits import PrefixHits

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]


class _Turns(NamedTuple):
    """The running requests in the order of service; each field is (turns,)."""

    rows: Ints
    missing: Ints  # tokens to compute, within their caps
    num_computed: Ints
    num_blocks: Ints
    is_rotated: bool  # fewer tokens than requests, so that some get none


class Step:
    """Spends a token budget and the available blocks, on running requests and then on waiting ones."""

    __slots__ = (
        "_available",
        "_budget",
        "_deferred",
        "_gone",
        "_hits",
        "_ir",
        "_may_repeat",
        "_preempted",
        "_preempted_for",
    )

    def __init__(self, ir: ScheduleIR, hits: PrefixHits, *, may_repeat: bool) -> None:
        self._ir = ir
        self._may_repeat = may_repeat  # if only decodes run
        self._hits = hits
        self._budget = ir.max_num_batched_tokens  # tokens left
        self._available = ir.available_memory  # blocks left
        self._preempted: list[int] = []  # for lack of blocks
        self._preempted_for: list[int] = []  # who lacked them
        self._gone: Mapping[int, str] = ir.preempted if ir.decisions else {}  # preempted by passes
        self._deferred: Mapping[int, str] = ir.deferred if ir.decisions else {}

    @property
    def num_tokens(self) -> int:
        """Tokens that the plan computes, once it is made."""
        return self._ir.max_num_batched_tokens - self._budget

    def plan(self) -> SchedulePlan:
        """Serve and admit with a few array operations; request by request only if blocks are short.

        The plan is read-only: passes are shown it before it is carried out.
        """
        ir = self._ir
        turns = self._take_turns()
        num_tokens = turns.missing
        if ir.running.num_prefills or len(turns.rows) > self._budget:
            num_tokens = _share(turns.missing, self._budget, is_rotated=turns.is_rotated)
        num_new_blocks, num_blocks = _num_blocks_beyond(
            turns, num_tokens, ir.block_size, are_decodes=not ir.running.num_prefills
        )
        if num_blocks > self._available:
            rows, num_tokens, num_new_blocks = self._serve_short(turns)
        else:
            rows = turns.rows
            self._available -= num_blocks
            num_served = int(np.count_nonzero(num_tokens))
            self._budget -= int(num_tokens.sum()) if ir.running.num_prefills else num_served
            if num_served < len(num_tokens):
                served = np.flatnonzero(num_tokens)
                rows, num_tokens, num_new_blocks = rows[served], num_tokens[served], num_new_blocks[served]
        admitted: list[Admission] = []
        reason = self._admit(admitted) if len(ir.pending) else None
        preempted = (*self._gone, *self._preempted)
        num_tokens = num_tokens.astype(np.int32, copy=False)
        num_new_blocks = num_new_blocks.astype(np.int32, copy=False)
        for column in (rows, num_tokens, num_new_blocks):
            column.setflags(write=False)
        return unchecked(
            SchedulePlan,
            pending=ir.pending,
            running=ir.running,
            step=ir.step,
            rows=rows,
            num_tokens=num_tokens,
            num_new_blocks=num_new_blocks,
            admitted=tuple(admitted),
            preempted=preempted,
            preempted_for=(*(-1 for _ in self._gone), *self._preempted_for) if preempted else (),
            swapped=tuple(row for row in preempted if row in ir.swapped) if preempted else (),
            num_deferred=len(ir.pending) - len(admitted),
            deferred_reason=reason,
            decisions=ir.decisions,
            is_steady=(
                self._may_repeat
                and not (ir.running.num_prefills or len(ir.pending) or ir.decisions)
                and 0 < len(rows) == len(ir.running)
            ),
        )

    def _take_turns(self) -> _Turns:
        ir, running = self._ir, self._ir.running
        rows = running.positions
        num_computed, num_blocks = running.num_computed_tokens, running.num_blocks
        missing = running.num_missing
        if ir.decisions:
            missing = np.minimum(missing, ir.caps("running"))
        if self._gone:
            self._available += int(num_blocks[list(self._gone)].sum())
            rows = np.delete(rows, list(self._gone))
        is_rotated = len(rows) > self._budget
        if is_rotated:
            # The request passed over longest comes first. Ties are rotated, or the first would win each one.
            rows = np.roll(rows, -(ir.step * self._budget % len(rows)))
            rows = rows[np.argsort(running.last_scheduled_step[rows], kind="stable")]
        if is_rotated or self._gone:
            missing, num_computed, num_blocks = missing[rows], num_computed[rows], num_blocks[rows]
        return _Turns(rows, missing, num_computed, num_blocks, is_rotated)

    def _serve_short(self, turns: _Turns) -> tuple[Ints, Ints, Ints]:
        """Serve requests one by one; those that lack blocks take them from the end of the order.

        A request that needs room is in the order itself. So it takes blocks only from requests behind
        it, and is preempted itself when none of them is left: the first in the order always advances, so
        every request eventually ends.
        """
        order = [row for row in self._ir.preemption.tolist() if row not in self._gone]
        served: dict[int, tuple[int, int]] = {}  # by row: tokens, new blocks
        gone: set[int] = set()
        reserved, share = (0, 0) if turns.is_rotated else (len(turns.rows), 1)
        for row, missing, num_computed, num_blocks in zip(
            *(each.tolist() for each in turns[:4]), strict=True
        ):
            reserved -= share
            num_tokens = min(missing, self._budget - reserved)
            if num_tokens < 1 or row in gone:
                continue
            uncovered = num_computed + num_tokens - num_blocks * self._ir.block_size
            needed = max(-(-uncovered // self._ir.block_size), 0)
            while needed > self._available and row not in gone:
                victim = order.pop()
                gone.add(victim)
                self._preempted_for.append(row)
                self._take_back(victim, served)
            if row not in gone:
                self._available -= needed
                self._budget -= num_tokens
                served[row] = (num_tokens, needed)
        rows = np.fromiter(served, np.int32, len(served))
        shares = np.array(list(served.values()), np.int32).reshape(-1, 2)
        return rows, shares[:, 0], shares[:, 1]

    def _take_back(self, victim: int, served: dict[int, tuple[int, int]]) -> None:
        num_tokens, num_new_blocks = served.pop(victim, (0, 0))
        self._preempted.append(victim)
        self._available += int(self._ir.running.num_blocks[victim]) + num_new_blocks
        self._budget += num_tokens

    def _admit(self, admitted: list[Admission]) -> DeferredReason | None:
        """Admit waiting requests in order, up to the first that does not fit; return what it lacks.

        Admits none after a preemption for lack of blocks: the blocks just taken would be given
        away. No request overtakes another that no pass defers, so none starves. Costs nothing for the
        requests that stay behind.
        """
        ir, deferred = self._ir, self._deferred
        if self._preempted:
            return "preemption"
        seats = ir.max_num_seqs - len(ir.running) + len(self._gone)
        if seats < 1 and len(ir.pending) > len(deferred):
            return "seats"
        order: Iterable[int] = range(len(ir.pending))
        caps = None
        if ir.decisions:
            rows = ir.admission
            if deferred:
                rows = rows[~np.isin(rows, list(deferred))]
            order = rows[: seats + 1].tolist()
            caps = ir.caps("pending")
        for row in order:
            if seats < 1:
                return "seats"
            if self._budget < 1:
                return "tokens"
            request = ir.pending[row]
            hit = self._hits(request)
            if hit.num_blocks_needed > self._available:
                return "blocks"
            # A hit may cover everything: the last token is still computed, for its logits.
            num_tokens = min(max(request.num_tokens - hit.num_tokens, 1), self._budget)
            if caps is not None:
                num_tokens = min(num_tokens, int(caps[row]))
            seats -= 1
            self._budget -= num_tokens
            self._available -= hit.num_blocks_needed
            self._hits.forget(request)
            admitted.append(Admission(row, num_tokens, hit.num_blocks_needed, hit.num_tokens))
        return "pass" if deferred else None


def _share(missing: Ints, budget: int, *, is_rotated: bool) -> Ints:
    """Return the tokens of each request, in the order of service.

    One token is reserved for each later request, so that no prefill delays a decode: with `slack`
    tokens beyond those, a request gets up to slack + 1, and passes on what it leaves. That is a
    sum that never falls below 0: the running sum, less its lowest value so far if that is negative.
    """
    if is_rotated:
        before = np.cumsum(missing) - missing
        left: Ints = np.clip(budget - before, 0, missing).astype(np.int32)
        return left
    if int(missing.sum()) + len(missing) <= budget:
        return missing
    change = 1 - missing.astype(np.int64)
    total = budget - len(missing) + np.cumsum(change)
    slack = (total - np.minimum(np.minimum.accumulate(total), 0))[:-1]
    slack = np.concatenate(([budget - len(missing)], slack))
    return np.minimum(missing, slack + 1).astype(np.int32)


def _num_blocks_beyond(
    turns: _Turns, num_tokens: Ints, block_size: int, *, are_decodes: bool
) -> tuple[Ints, int]:
    """Return the blocks that each request needs beyond those it holds, none for no tokens, and their sum."""
    num_held, num_needed = turns.num_blocks * block_size, turns.num_computed + num_tokens
    is_short = num_needed > num_held
    num_short = int(np.count_nonzero(is_short))
    if not num_short or (are_decodes and not np.count_nonzero(turns.num_computed > num_held)):
        return is_short.astype(np.int32), num_short  # one token needs at most one block
    needed: Ints = np.maximum(-((num_held - num_needed) // block_size), 0)
    if np.count_nonzero(num_tokens) < len(num_tokens):
        needed[num_tokens == 0] = 0
    return needed, int(needed.sum())
