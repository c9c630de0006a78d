"""The sampler's inputs besides the logits, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import EngineError
from sagellm.core.protocols.engine import SampledToken as SampledToken
from sagellm.core.tokens import TokenIds
from sagellm.engines.sampling.params import SamplingParams

LogitsStates = tuple[tuple[int, Any], ...]
"""Which of a sampler's logits processors a sequence uses, in order, and its state in each."""


@dataclass(slots=True)
class SamplingRow:
    """What the sampler needs to know about the sequence of one row of logits."""

    params: SamplingParams
    seed: int
    position: int  # output tokens so far; the counter of the random numbers
    prompt_token_ids: TokenIds
    output_token_ids: Sequence[int]
    states: LogitsStates = ()  # of `Sampler.start`
    mask: npt.NDArray[np.uint32] | None = None  # (words,) tokens that may be drawn, as in `TokenMasks`

    @property
    def is_changed(self) -> bool:
        """Whether its logits are changed before they are filtered."""
        return bool(self.states) or self.params.has_penalties or self.mask is not None


class BadLogitsError(EngineError):
    """No token can be drawn from some rows, whose indices are `rows`. The others are sound."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        shown = ", ".join(map(str, self.rows[:8])) + (", …" if len(self.rows) > 8 else "")
        super().__init__(
            f"no token can be chosen from row {shown} of the logits: a logit is NaN or infinite, or all "
            "of them are masked"
        )

    def __reduce__(self) -> tuple[type[BadLogitsError], tuple[tuple[int, ...]]]:
        """Cross a socket with the rows, from which the message is made again."""
        return type(self), (self.rows,)
