"""The data exchanged between the core, which plans steps, and the workers, which compute them.

All of it can be written to a socket or shared memory as it is; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NewType

from sagellm.core.ids import BlockId, SequenceId
from sagellm.core.tokens import TokenIds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sagellm.core.protocols.engine import SampledToken

    Ints = npt.NDArray[np.int32]

Seat = NewType("Seat", int)
"""Where a running sequence sits: its row in the tables of the core and of every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatArrival:
    """A sequence that takes a seat, with everything that a worker needs to know about it.

    A preempted sequence arrives again with its output so far, so that a worker keeps nothing about departed
    sequences.
    """

    seat: Seat
    sequence_id: SequenceId
    token_ids: TokenIds  # prompt, then output
    num_prompt: int
    params: Any  # sagellm.engines.SamplingParams
    seed: int
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BlockUpdates:
    """Entries of block tables that changed: `tables[seats, indices] = block_ids`; all (updates,)."""

    seats: Ints
    indices: Ints
    block_ids: Ints


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy the KV of each pair's first block to its second, pair by pair in order."""

    pairs: Sequence[tuple[BlockId, BlockId]]


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Copy the KV of blocks to host memory, `KVLayout.block_bytes` each."""

    block_ids: Sequence[BlockId]
    into: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Copy what `ReadBlocks` returned into blocks."""

    block_ids: Sequence[BlockId]
    data: Sequence[memoryview]


KVOp = CopyBlocks | ReadBlocks | WriteBlocks


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of tokens, one per row, one after another."""

    ids: Ints  # (tokens,)
    counts: Ints  # (rows,)

    def lists(self) -> list[list[int]]:
        """Return the tokens of each row."""
        ids = iter(self.ids.tolist())
        return [list(islice(ids, count)) for count in self.counts.tolist()]


@dataclass(frozen=True, slots=True)
class Scored:
    """Positions `[start, stop)` of a row's prompt; each gives the next token's log-probability."""

    row: int
    start: int
    stop: int
    num_top: int  # most likely tokens to report beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step. Rows are sequences: row `i` computes the tokens `[starts[i], starts[i] + num_new[i])` of
    `seats[i]`.

    A worker first removes departures and seats arrivals, then updates block tables, then executes
    `kv_ops` in order, and only then writes KV. It has the tokens already: those of an arrival,
    those it sampled itself, and `drafts`, which follow the last token known.

    `is_sampled` names the rows that reach the last token known: from its logits, and those of each draft,
    a token is drawn. KV writes are idempotent, and random numbers are keyed by seed and position, so
    rows may be submitted again.
    """

    step: int
    seats: Ints  # (rows,)
    num_new: Ints  # (rows,) tokens to compute, drafts included
    starts: Ints  # (rows,) position of the first of them
    is_sampled: npt.NDArray[np.bool_]  # (rows,)
    arrivals: Sequence[SeatArrival] = ()
    departures: Sequence[Seat] = ()
    new_blocks: BlockUpdates | None = None
    kv_ops: Sequence[KVOp] = ()
    drafts: Runs | None = None  # of the rows; None: none anywhere
    scored: Sequence[Scored] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.num_new.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The results of one step, by its rows.

    A sampled row has the tokens drawn at the last token known and at each draft that was accepted: one
    more than `num_accepted`. `logprobs` has a row only if it asked for them, one entry for each of its
    tokens. A row in `errors` has no tokens; its computation may be repeated.
    """

    step: int
    tokens: Runs
    num_accepted: Ints  # (rows,) drafts
    logprobs: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)
    scores: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)  # of prompt tokens
    errors: Mapping[int, BaseException] = field(default_factory=dict)

    @classmethod
    def failed(cls, step: StepInput, error: BaseException) -> StepOutput:
        """Return the output of a step that failed as a whole."""
        import numpy as np

        none = np.zeros(len(step.seats), np.int32)
        return cls(
            step=step.step,
            tokens=Runs(none[:0], none),
            num_accepted=none,
            errors=dict.fromkeys(range(len(none)), error),
        )
