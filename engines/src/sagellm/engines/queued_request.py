"""A checked request on its way to an engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

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


class QueuedRequest(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """A request that passed all checks: `InputProcessor` builds it, and an engine gets its sequences.

    It is also the message that crosses the socket, so nothing is rebuilt on the other side.
    """

    request: Request
    params: SamplingParams
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)]  # of the first sequence; each further one adds 1
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
        params = others = self.params
        if params.prompt_logprobs is not None and params.n > 1:
            others = replace(params, prompt_logprobs=None)
        return [
            QueuedSequence(
                sequence_id,
                self.request,
                others if index else params,
                (self.seed + index) % (MAX_SEED + 1),
                self.stop_token_ids,
            )
            for index, sequence_id in enumerate(self.sequence_ids)
        ]
