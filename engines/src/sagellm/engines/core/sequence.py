"""A sequence: one continuation of one prompt, from admission to its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Self

from sagellm.core import (
    BlockId,
    PrefixMatch,
    Request,
    RequestId,
    RequestStatus,
    ScheduleRequest,
    SequenceId,
    TokenIds,
)
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.rows import LogitsStates, SampledToken


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """What the core knows of one sequence.

    The tokens are, by position:
    [0, num_cached)             KV from the prefix cache, locked by this sequence
    [num_cached, num_computed)  KV computed here
    [num_computed, num_tokens)  known, no KV yet
    """

    sequence_id: SequenceId
    request: Request
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # EOS included unless the request ignores it
    schedule: ScheduleRequest
    output_token_ids: array[int] = field(default_factory=lambda: array("i"))
    block_ids: list[BlockId] = field(default_factory=list)
    match: PrefixMatch | None = None  # the lock held on the prefix cache
    status: RequestStatus = RequestStatus.WAITING
    num_cached_tokens: int | None = None  # of the first admission
    num_preemptions: int = 0
    scheduled_ns: int | None = None  # start of the first step that computed some of it
    logits_states: LogitsStates | None = None  # of the logits processors, from the first sampling on
    num_to_score: int = 0  # positions of the prompt whose logits give the next prompt token's log-probability
    num_scored: int = 0  # those for which that is done
    prompt_scores: list[SampledToken] = field(default_factory=list)  # until the first token is handed out

    @classmethod
    def of(
        cls,
        request: Request,
        sequence_id: SequenceId,
        *,
        params: SamplingParams,
        seed: int,
        stop_token_ids: frozenset[int],
    ) -> Self:
        """Make a sequence that waits, with what the scheduler is to know of it."""
        schedule = ScheduleRequest(
            request_id=RequestId(sequence_id),
            token_ids=request.token_ids,
            max_tokens=request.max_tokens,
            priority=request.priority,
            arrived_time=request.arrival_ns / 1e9,
        )
        return cls(
            sequence_id=sequence_id,
            request=request,
            params=params,
            seed=seed,
            stop_token_ids=stop_token_ids,
            schedule=schedule,
            num_to_score=0 if params.prompt_logprobs is None else len(request.token_ids) - 1,
        )

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are still wanted; KV of what is before it may come from a cache."""
        return self.num_scored if self.num_scored < self.num_to_score else self.num_tokens - 1

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.request.token_ids) + len(self.output_token_ids)

    def token_ids(self) -> TokenIds:
        """Return prompt and output packed together."""
        prompt = self.request.token_ids
        return TokenIds(prompt.data + self.output_token_ids.tobytes()) if self.output_token_ids else prompt

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Return the token ids at positions start … stop - 1."""
        num_prompt = len(self.request.token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt].tolist()
        prompt_part = self.request.token_ids[start:stop].tolist()
        return prompt_part + self.output_token_ids[: max(0, stop - num_prompt)].tolist()


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens [start, start + num_tokens) of a sequence in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """Position after the last token to compute."""
        return self.start + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether the step reaches the sequence's last known token, so that the next one is sampled."""
        return self.stop == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """Positions of this step whose logits score the next prompt token."""
        sequence = self.sequence
        return range(max(self.start, sequence.num_scored), min(self.stop, sequence.num_to_score))
