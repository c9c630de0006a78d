"""Log-probabilities of tokens, from the columns in which they are computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sagellm.core.protocols.engine import PromptScores
from sagellm.engines.sampling.rows import SampledToken


def width(num_top: int) -> int:
    """Return how many columns `token_logprobs` has."""
    return 2 + 2 * num_top


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
