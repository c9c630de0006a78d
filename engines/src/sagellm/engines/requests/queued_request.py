"""A checked request on its way to an engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core import Request, RequestId, SequenceId
from sagellm.engines.sampling.params import SamplingParams

MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class QueuedSequence:
    """One continuation of a queued request: the EngineSequence that engines receive."""

    sequence_id: SequenceId
    request: Request
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that passed all checks: `InputProcessor` builds it, and an engine gets its sequences.

    The requests of one job have the same `params` object, in the core's process too: parameters may be a
    thousand times larger than a prompt.
    """

    request: Request
    params: SamplingParams
    seed: int  # of the first sequence; each further one adds 1
    stop_token_ids: frozenset[int]  # the end of sequence included, unless the request ignores it

    @property
    def request_id(self) -> RequestId:
        """The id, given or generated."""
        return self.request.request_id

    @property
    def sequence_ids(self) -> list[SequenceId]:
        """The ids of its sequences, unique even though "a#0" may be a request id too."""
        return [SequenceId(f"{self.request_id}#{index}") for index in range(self.params.n)]

    @property
    def sequences(self) -> list[QueuedSequence]:
        """One sequence per continuation; only the first scores the prompt, for all of them."""
        return [
            QueuedSequence(
                sequence_id,
                self.request,
                self.params.without_prompt_logprobs if index else self.params,
                (self.seed + index) % (MAX_SEED + 1),
                self.stop_token_ids,
            )
            for index, sequence_id in enumerate(self.sequence_ids)
        ]
