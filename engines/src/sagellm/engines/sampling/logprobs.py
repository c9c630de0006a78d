"""Log-probabilities of the model's own logits, before penalties and temperature."""

from __future__ import annotations

import torch

from sagellm.engines.sampling.inverse_cdf import block_masses, softmax_into
from sagellm.engines.sampling.selection import first_argmax, largest


def log_partition(logits: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(logits))) of each row, (rows, 1) float64, within 1e-6."""
    probabilities = softmax_into(scratch, logits)
    maxima, ids = first_argmax(logits)
    # exp(max) / p(max) is the sum that softmax divided by; the second sum takes its rounding out.
    share = probabilities.gather(1, ids[:, None]).double() / block_masses(probabilities).sum(1, keepdim=True)
    return maxima.double()[:, None] - share.log()


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, scratch: torch.Tensor
) -> torch.Tensor:
    """Return (rows, 1 + 2 * num_top) float64: the log-probability of each row's token, then those of
    the most likely tokens, then the ids of these.
    """
    partition = log_partition(logits, scratch)
    chosen = logits.gather(1, token_ids[:, None])
    if not num_top:
        return chosen.double() - partition
    top = largest(logits, num_top)
    return torch.cat((chosen.double() - partition, top.values.double() - partition, top.ids.double()), dim=1)
