"""Log-probabilities of the model's own logits, before penalties, processors and temperature, with torch."""

from __future__ import annotations

import torch

from sagellm.engines.sampling.inverse_cdf import block_masses, softmax_into
from sagellm.engines.sampling.selection import first_argmax, largest


def log_partition(logits: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(logits))) of each row, (rows, 1) float64, within 1e-6."""
    probabilities = softmax_into(scratch, logits)
    maxima, ids = first_argmax(logits)
    # exp(max) / p(max) is the sum that softmax divided by; the second sum corrects its rounding.
    share = probabilities.gather(1, ids[:, None]).double() / block_masses(probabilities).sum(1, keepdim=True)
    return maxima.double()[:, None] - share.log()


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, scratch: torch.Tensor
) -> torch.Tensor:
    """Return (rows, 2 + 2 * num_top) float64: the log-probability of each row's token and its rank, then the
    log-probabilities of the most likely tokens, then their ids.
    """
    partition = log_partition(logits, scratch)
    chosen = logits.gather(1, token_ids[:, None])
    rank = (logits >= chosen).sum(1, keepdim=True)
    columns = [chosen.double() - partition, rank.double()]
    if num_top:
        top = largest(logits, num_top)
        columns += [top.values.double() - partition, top.ids.double()]
    return torch.cat(columns, dim=1)
