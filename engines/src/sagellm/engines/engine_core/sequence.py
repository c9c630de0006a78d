"""A sequence: one continuation of one prompt, from admission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Self

from sagellm.core import (
    EMPTY,
    BlockId,
    PredictionRequest,
    PrefixMatch,
    Request,
    SequenceId,
    TokenIds,
)
from sagellm.core.lifetime_scores import ScoredPrediction
from sagellm.core.protocols.engine import EngineSequence, PromptScores
from sagellm.core.protocols.step import Seat
from sagellm.core.tenant import hash_of
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    from sagellm.engines.engine_core.preparing import SequenceGrammar


class RequestStatus(Enum):
    """Where a request is in its life.

    SWAPPED is a waiting request that was preempted, and whose KV was copied to the tiers.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_LATE = "deadline"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """Whether the request will never run again."""
        return self.name.startswith("FINISHED")


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """What the core knows about one sequence: its fixed data, and a view of its seat while it runs.

    Its counts are columns of `Seats`. While it waits it has no seat, no blocks and no KV, and `waiting_ids`
    are its tokens: the prompt, and what it had generated before it was preempted.
    """

    sequence_id: SequenceId
    request: Request
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # EOS included unless the request ignores it
    key: int = field(init=False)  # hash_of(sequence_id)
    max_output_tokens: int = field(init=False)
    """Tokens at which its output ends.

    Schedulers and predictors are told `request.max_tokens`. That is the same but in a replay, whose requests
    all state one limit.
    """
    seat: Seat | None = None
    seats: Seats | None = None  # set while it has a seat
    waiting_ids: TokenIds = EMPTY
    grammar: SequenceGrammar | None = None  # what its output must match
    match: PrefixMatch | None = None  # the lock held on the prefix cache
    status: RequestStatus = RequestStatus.WAITING
    num_cached_tokens: int | None = None  # of the first admission
    num_preemptions: int = 0
    predicted_tokens: float | None = None  # of its whole output, as predicted last
    confidence: float | None = None  # of that prediction
    asked: PredictionRequest | None = None  # what the predictor was told when it arrived
    scored: ScoredPrediction | None = None  # of when it arrived; None: not to be scored
    scheduled_ns: int | None = None  # start of the first step that computed any of it
    first_token_ns: int | None = None
    num_to_score: int = 0  # positions of the prompt whose logits give the next prompt token's log-probability
    num_scored: int = 0  # of those, the positions that are done
    prompt_scores: list[PromptScores] = field(default_factory=list)  # until the first token is returned

    def __post_init__(self) -> None:
        self.key = hash_of(self.sequence_id)
        own, stated = self.params.max_tokens, self.request.max_tokens
        self.max_output_tokens = stated if own is None else min(own, stated)

    @classmethod
    def of(cls, given: EngineSequence) -> Self:
        """Create a waiting sequence."""
        return cls(
            sequence_id=given.sequence_id,
            request=given.request,
            params=given.params,
            seed=given.seed,
            stop_token_ids=given.stop_token_ids,
            waiting_ids=given.request.token_ids,
            num_to_score=0 if given.params.prompt_logprobs is None else len(given.request.token_ids) - 1,
        )

    def take_grammar(self, grammar: SequenceGrammar) -> None:
        """Have the output match this; its masks see to `min_tokens`, and no worker reads the text."""
        self.grammar = grammar
        self.params = replace(self.params, structured_outputs=None, min_tokens=0)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        if self.seat is None or self.seats is None:
            return len(self.waiting_ids)
        return int(self.seats.num_tokens[self.seat])

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - len(self.request.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is present: every step that computes it has been collected."""
        return 0 if self.seat is None or self.seats is None else int(self.seats.num_committed[self.seat])

    @property
    def block_ids(self) -> list[BlockId]:
        """A copy of its block ids; empty while it waits."""
        return [] if self.seat is None or self.seats is None else self.seats.block_ids(self.seat)

    def token_ids(self) -> TokenIds:
        """Return prompt and output packed together."""
        if self.seat is None or self.seats is None:
            return self.waiting_ids
        return self.seats.token_ids(self.seat)

    def output_token_ids(self) -> TokenIds:
        """Return the tokens generated so far."""
        return self.token_ids()[len(self.request.token_ids) :]
