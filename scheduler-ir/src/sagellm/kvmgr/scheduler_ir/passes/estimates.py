"""How long requests take, by the cost of steps if it is known."""

from __future__ import annotations

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


def num_prompt_tokens_within(ir: ScheduleIR, cost: StepCost, target_ms: float, min_share: float = 0.0) -> int:
    """Return how many prompt tokens a step can compute beside its decodes in a time.

    What follows the longest running prompt so far. Its tokens get at least `min_share` of the time, even
    where the decodes and the KV that the prompt reads take all of it; a quarter of that where these alone
    take more than STRETCH times as long, and in between what keeps the step within STRETCH.
    """
    running = ir.running
    missing = running.num_missing
    is_decode = missing == 1
    num_decodes = int(np.count_nonzero(is_decode))
    context = int(running.num_tokens.sum(where=is_decode, dtype=np.int64))
    prefilled = running.num_computed_tokens[missing > 1]
    start = int(prefilled.max()) if len(prefilled) else 0
    prompt_ns = cost.predict_ns(StepWork(0, 1, start, 0, 1)) - cost.base_ns
    decodes_ns = cost.predict_ns(StepWork(num_decodes, num_decodes, context, context))
    target_ns, fixed_ns = 1e6 * target_ms, decodes_ns + prompt_ns
    share_ns = min_share * target_ns
    least_ns = min(max(STRETCH * target_ns - fixed_ns, share_ns / 4), share_ns)
    return num_tokens_within(cost, prompt_ns + max(target_ns - fixed_ns, least_ns), start)


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
