"""How long requests take, by the cost of steps if it is known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.protocols.request_rows import RequestRows
from sagellm.core.protocols.scheduler_ir import ScheduleIR
from sagellm.core.step_cost import StepCost, StepWork

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


STRETCH = 1.3
"""How much longer than its target a step may take so that prompts get their share."""

_ENDLESS = 1 << 31
"""Tokens of a prompt that no time is enough for."""


def prefill_ns(
    cost: StepCost, starts: npt.NDArray[np.integer], num_tokens: npt.NDArray[np.integer]
) -> Floats:
    """Return the time to compute each request's tokens that follow its first `starts` in one step: (rows,).

    Without the base of the step. Like `StepCost.predict_ns`, several tokens count as a prefill.
    """
    num, start = num_tokens.astype(np.float64), starts.astype(np.float64)
    pairs = num * (start + num / 2)
    tokens_ns = cost.token_ns * num + cost.kv_token_ns * (start + num) + cost.pair_ns * pairs
    return cost.seq_ns + cost.prefill_ns * (num > 1) + tokens_ns


def decode_ns(cost: StepCost, contexts: npt.NDArray[np.integer], num_seqs: int) -> Floats:
    """Return the time of one output token at each context, with its share of the base of a step: (rows,)."""
    base = cost.base_ns / max(num_seqs, 1) + cost.seq_ns + cost.token_ns
    return base + (cost.kv_token_ns + cost.pair_ns) * contexts.astype(np.float64)


def remaining_output(rows: RequestRows, min_confidence: float) -> npt.NDArray[np.float64]:
    """Return how many output tokens each request still has, as predicted if that is trusted: (rows,).

    Others have the mean of the trusted predictions, and 0 if there are none; each has at most what its
    max_tokens leaves.
    """
    predicted = rows.predicted_remaining_tokens
    is_trusted = ~np.isnan(predicted) & (rows.confidence >= min_confidence)
    if not is_trusted.any():
        return np.zeros(len(rows))
    left = np.maximum(rows.max_tokens - (rows.num_tokens - rows.num_prompt_tokens), 1)
    return np.minimum(np.where(is_trusted, predicted, predicted[is_trusted].mean()), left).astype(np.float64)


def decodes_ns(ir: ScheduleIR, cost: StepCost) -> float:
    """Return the time of a step with the decodes alone."""
    is_decode = ir.running.num_missing == 1
    num_decodes = int(np.count_nonzero(is_decode))
    context = int(ir.running.num_tokens.sum(where=is_decode, dtype=np.int64))
    return cost.predict_ns(StepWork(num_decodes, num_decodes, context, context))


def num_prompt_tokens_within(ir: ScheduleIR, cost: StepCost, target_ms: float, min_share: float = 0.0) -> int:
    """Return how many prompt tokens a step can compute beside its decodes in a time.

    Prompts take their time in the order in which the step serves them, each behind what it has computed or
    what the prefix cache has of it. All running ones read that in any case. Tokens get at least `min_share`
    of the time, even where the decodes and what is read take all of it; a quarter of that where these alone
    take more than STRETCH times as long, and in between what keeps the step within STRETCH. What is more
    than the step's token budget is not told apart.
    """
    fixed_ns, begun = decodes_ns(ir, cost), _begun(ir)
    prompts = [(start, missing, _prompt_ns(cost, start, 0)) for start, missing in begun]
    waiting = _waiting(ir)
    if not prompts:
        start, missing = next(waiting, (0, _ENDLESS))
        prompts = [(start, missing, _prompt_ns(cost, start, 0))]
    fixed_ns += sum(read_ns for _, _, read_ns in prompts)
    target_ns = 1e6 * target_ms
    share_ns = min_share * target_ns
    least_ns = min(max(STRETCH * target_ns - fixed_ns, share_ns / 4), share_ns)
    left_ns, total = max(target_ns - fixed_ns, least_ns), 0
    more = ((start, missing, 0.0) for start, missing in chain(waiting, repeat((0, _ENDLESS))))
    for start, missing, read_ns in chain(prompts, more):
        if total >= ir.max_num_batched_tokens:
            return total
        fitting = num_tokens_within(cost, left_ns + read_ns, start)
        if fitting < missing:
            break
        total += missing
        left_ns -= _prompt_ns(cost, start, missing) - read_ns
    return max(total + fitting, len(begun))


def _begun(ir: ScheduleIR) -> list[tuple[int, int]]:
    """Return the tokens that each running prompt has and those that the step may compute."""
    running = ir.running
    num_tokens = np.minimum(running.num_missing, ir.caps("running"))
    rows = np.flatnonzero((running.num_missing > 1) & (num_tokens > 0))
    if ir.preempted:
        rows = rows[~np.isin(rows, list(ir.preempted))]
    return list(zip(running.num_computed_tokens[rows].tolist(), num_tokens[rows].tolist(), strict=True))


def _waiting(ir: ScheduleIR) -> Iterator[tuple[int, int]]:
    """Yield the same for each waiting request that may be admitted, in order."""
    if not ir.can_admit:
        return
    order, caps = ir.admission, ir.caps("pending")
    if ir.deferred:
        order = order[~np.isin(order, list(ir.deferred))]
    for row in order[: ir.num_free_seats].tolist():
        num_cached = ir.hits([row])[0].num_tokens
        yield num_cached, min(max(int(ir.pending.num_tokens[row]) - num_cached, 1), int(caps[row]))


def _prompt_ns(cost: StepCost, start: int, num_tokens: int) -> float:
    """Return what so many tokens behind the first `start` of a prompt add to a step."""
    num_pairs = num_tokens * (2 * start + num_tokens) // 2
    return cost.predict_ns(StepWork(num_tokens, 1, start + num_tokens, num_pairs, 1)) - cost.base_ns


def num_tokens_within(cost: StepCost, duration_ns: float, start: int) -> int:
    """Return how many tokens of one sequence, after its first `start`, take at most this long.

    The base does not count: n tokens take n · token + (start + n) · kv + n · (start + n ÷ 2) · pair + seq
    + prefill.
    """
    left = duration_ns - cost.seq_ns - cost.prefill_ns - cost.kv_token_ns * start
    linear = cost.token_ns + cost.kv_token_ns + cost.pair_ns * start
    if left <= 0:
        return 0
    # The root of a quadratic, in the form that subtracts nothing and so also holds without pairs.
    divisor = linear + (linear * linear + 2 * cost.pair_ns * left) ** 0.5
    return int(min(2 * left / divisor, 1 << 30)) if divisor else 1 << 30
