"""What the core tells of a sequence after a step."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core import FinishReason, SequenceId
from sagellm.engines.sampling.rows import SampledToken


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step did to one sequence: a new token, its end, or both.

    With the first token come when the sequence was first scheduled, and the log-probabilities of the prompt,
    if they were asked for: one entry for each token but the first, which follows nothing.
    """

    sequence_id: SequenceId
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_scores: list[SampledToken] | None = None
    scheduled_ns: int | None = None  # of the clock that all processes of a machine share
