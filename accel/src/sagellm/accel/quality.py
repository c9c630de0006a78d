"""How much a quantized model's predictions differ from the original's."""

from __future__ import annotations

import torch

from sagellm.accel.slices import row_slices
from sagellm.core import InvalidInputError


@torch.no_grad()
def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the mean of KL(P ‖ Q) = Σ p · (ln p − ln q) over positions, in nats.

    P is the softmax of `reference_logits`, Q that of `logits`, both (…, vocab) and of equal shape;
    computed in float64, a slice of positions at a time. Tokens that P excludes (logit −inf) add
    nothing; tokens that only Q excludes make the result infinite. Raises InvalidInputError for
    shapes that differ or are empty, and for logits that are NaN or exclude every token.
    """
    if reference_logits.shape != logits.shape or logits.dim() == 0 or logits.numel() == 0:
        raise InvalidInputError(
            f"the logits have shapes {tuple(reference_logits.shape)} and {tuple(logits.shape)}; "
            "they must be equal, (…, vocab), and not empty"
        )
    vocab_size = logits.shape[-1]
    reference_rows = reference_logits.reshape(-1, vocab_size)
    rows = logits.reshape(-1, vocab_size)
    total = 0.0
    for start, stop in row_slices(rows.shape[0], vocab_size * 8 * 4, rows.device):
        log_p = reference_rows[start:stop].to(torch.float64).log_softmax(dim=-1)
        log_q = rows[start:stop].to(torch.float64).log_softmax(dim=-1)
        if bool(log_p.isnan().any()) or bool(log_q.isnan().any()):
            raise InvalidInputError(
                f"logits of positions {start} to {stop - 1} hold NaN or +inf, or exclude every token"
            )
        ratio = (log_p - log_q).masked_fill_(log_p == -torch.inf, 0.0)
        total += float(log_p.exp_().mul_(ratio).sum())
    return total / rows.shape[0]
