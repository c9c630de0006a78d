"""Log-probabilities of the model's own logits, before penalties, processors and temperature."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.protocols.engine import PromptScores
from sagellm.engines.sampling.inverse_cdf import block_masses, softmax_into
from sagellm.engines.sampling.rows import SampledToken
from sagellm.engines.sampling.selection import first_argmax, largest


def log_partition(logits: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(logits))) of each row, (rows, 1) float64, within 1e-6."""
    probabilities = softmax_into(scratch, logits)
    maxima, ids = first_argmax(logits)
    # exp(max) / p(max) is the sum that softmax divided by; the second sum corrects its rounding.
    share = probabilities.gather(1, ids[:, None]).double() / block_masses(probabilities).sum(1, keepdim=True)
    return maxima.double()[:, None] - share.log()


def width(num_top: int) -> int:
    """Return how many columns `token_logprobs` has."""
    return 2 + 2 * num_top


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


def with_logprobs(token_id: int, columns: npt.NDArray[np.float64], num_top: int) -> SampledToken:
    """Return a token with its row of `token_logprobs`, which may hold more than was requested."""
    held = (len(columns) - 2) // 2
    num_top = min(num_top, held)
    top = zip(columns[2 + held : 2 + held + num_top], columns[2 : 2 + num_top], strict=True)
    best_first = sorted(
        ((int(token), float(value)) for token, value in top), key=lambda entry: (-entry[1], entry[0])
    )
    return SampledToken(token_id, float(columns[0]), best_first, int(columns[1]))


def packed(columns: npt.NDArray[np.float64]) -> PromptScores:
    """Return rows of `token_logprobs`, packed; the most likely tokens come best first, equal ones by id."""
    num_top = (columns.shape[1] - 2) // 2
    values, ids = columns[:, 2 : 2 + num_top], columns[:, 2 + num_top :].astype(np.int32)
    order = np.lexsort((ids, -values))
    best = np.take_along_axis(values, order, axis=1)
    return PromptScores(
        num_top,
        columns[:, 1].astype(np.int32).tobytes(),
        np.concatenate((columns[:, :1], best), axis=1).tobytes(),
        np.take_along_axis(ids, order, axis=1).tobytes(),
    )
