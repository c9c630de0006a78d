"""What learnt predictors see of a request: numbers, answers to its prefixes, and the end of its prompt."""

from __future__ import annotations

import math
from statistics import fmean, median, pstdev
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import PredictionRequest
from sagellm.core.protocols.prefix_cache import PrefixAnswers
from sagellm.core.tokens import pack

MAX_LEVELS = 4
"""Prefixes of which answers are known, the longest first."""

MAX_TEXT = 64
"""Tokens at the end of the prompt."""

NUM_WORDS = 4096
"""Numbers that token ids are hashed to; 0 is padding."""

_WAVES = math.pi * np.array([1.0, 2.0, 4.0, 8.0])

NUM_NUMBERS = 2 + 2 * len(_WAVES)
NUM_OF_LEVEL = 8


class Features(NamedTuple):
    """A request's features, float32 but for the text."""

    numbers: npt.NDArray[np.float32]  # (NUM_NUMBERS,)
    levels: npt.NDArray[np.float32]  # (at most MAX_LEVELS, NUM_OF_LEVEL)
    text: npt.NDArray[np.int64]  # (at most MAX_TEXT,) of 1 … NUM_WORDS - 1


def features_of(request: PredictionRequest) -> Features:
    """Return the features of a request."""
    num_tokens = len(request.token_ids)
    size = math.log(num_tokens + 1) - 7
    limit = math.log(min(request.max_length, 1 << 17) + 1) - 7
    numbers = np.concatenate(([size, limit], np.sin(_WAVES * size), np.cos(_WAVES * size)))
    levels = [_level(found, num_tokens, request.arrival_ns) for found in request.answers[:MAX_LEVELS]]
    return Features(
        numbers.astype(np.float32),
        np.array(levels, np.float32).reshape(-1, NUM_OF_LEVEL),
        _text(request),
    )


def _level(found: PrefixAnswers, num_tokens: int, now_ns: int) -> list[float]:
    logs = [math.log(length + 1) - 5 for length in found.lengths]
    gap_s = max((now_ns - found.last_ns) / 1e9, 0.1)
    return [
        math.log(found.num_tokens + 1) - 7,
        math.log(max(num_tokens - found.num_tokens, 0) + 1) - 6,
        math.log(found.num_answers),
        logs[-1],
        median(logs),
        fmean(logs),
        pstdev(logs),
        math.log(gap_s) - 3,
    ]


def _text(request: PredictionRequest) -> npt.NDArray[np.int64]:
    """Return the hashed end of the prompt; empty if it repeats one token, as where a trace has no text."""
    ids = np.frombuffer(pack(request.token_ids[-MAX_TEXT:]).data, np.int32).astype(np.int64)
    if len(ids) and (ids == ids[0]).all():
        ids = ids[:0]
    return ids % (NUM_WORDS - 1) + 1
