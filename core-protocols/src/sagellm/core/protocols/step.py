"""The data exchanged between the core, which plans steps, and the workers, which compute them.

All of it can be written to a socket or shared memory as it is; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, NewType

from sagellm.core.errors import EngineError
from sagellm.core.ids import BlockId, SequenceId
from sagellm.core.protocols.engine import PromptScores
from sagellm.core.tokens import TokenIds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sagellm.core.protocols.engine import SampledToken

    Ints = npt.NDArray[np.int32]
    Floats = npt.NDArray[np.float32]

Seat = NewType("Seat", int)
"""Where a running sequence sits: its row in the tables of the core and of every worker."""


BufferId = NewType("BufferId", int)
"""Host memory that a step reads or writes, by its number in `HostBuffers`: a socket takes no memory."""


class HostBuffers:
    """Host memory that the core lends to the steps in flight. One thread lends and takes back."""

    def __init__(self) -> None:
        self._views: dict[BufferId, memoryview] = {}
        self._num_lent = 0

    def lend(self, views: Sequence[memoryview]) -> list[BufferId]:
        """Number memory that stays valid until it is taken back."""
        first = self._num_lent
        self._num_lent += len(views)
        lent = [BufferId(number) for number in range(first, self._num_lent)]
        self._views.update(zip(lent, views, strict=True))
        return lent

    def views(self, lent: Sequence[BufferId]) -> list[memoryview]:
        """Return the memory of these numbers."""
        return [self._views[buffer] for buffer in lent]

    def take_back(self, lent: Sequence[BufferId]) -> None:
        """Forget these numbers."""
        for buffer in lent:
            del self._views[buffer]


class SeatArrival(NamedTuple):
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
    """Entries of block tables that changed: `tables[groups, seats, indices] = block_ids`; all (updates,)."""

    groups: Ints  # KV groups; each has its own blocks and one table
    seats: Ints
    indices: Ints
    block_ids: Ints


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy the KV of each pair's first block to its second, pair by pair in order.

    Blocks of this and the other operations are those of the first KV group.
    """

    pairs: Sequence[tuple[BlockId, BlockId]]


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Copy the KV of blocks to host memory, `KVLayout.block_bytes` each."""

    block_ids: Sequence[BlockId]
    into: Sequence[BufferId]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Copy what `ReadBlocks` returned into blocks."""

    block_ids: Sequence[BlockId]
    data: Sequence[BufferId]


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
class TokenMasks:
    """Which tokens may be drawn at some of a step's sampled positions.

    The sampled positions of a step are numbered row by row: a sampled row has one more than it has drafts,
    the last token known first. Bit `t % 32` of word `t // 32` says whether token `t` is allowed; bits beyond
    the vocabulary are not read.
    """

    positions: Ints  # (masks,) rising
    words: npt.NDArray[np.uint32]  # (masks, ceil(vocab_size / 32))


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
    a token is drawn. A draft is accepted if and only if it is the token drawn in its place, with that
    position's own random number, so that the output is the same without drafts. The core chooses drafts,
    counts them in `num_new` and has reserved blocks for them.

    KV writes are idempotent, and random numbers are keyed by seed and position, so rows may be submitted
    again.

    `num_steps` above 1 is only for executors that foresee outputs: each row is a decode, and computes one
    token after the other, each drawn from the one before.
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
    masks: TokenMasks | None = None  # None: none, or they follow
    late_masks: npt.NDArray[np.bool_] | None = None  # (rows,) whose masks follow: they need a token in flight
    scored: Sequence[Scored] = ()
    hidden_rows: npt.NDArray[np.bool_] | None = None  # (rows,) sampled ones whose hidden states are wanted
    num_steps: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.num_new.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The results of one step, by its rows.

    A sampled row has the tokens drawn at the last token known and at each draft that was accepted: one
    more than `num_accepted`. `logprobs` has a row only if it asked for them, one entry for each of its
    tokens; `scores` has the rows of `scored`. `hidden_states` has the `hidden_rows` that have tokens: of each
    token, what the head was given where it was drawn. A row in `errors` has no tokens; its computation may
    be repeated.
    """

    step: int
    tokens: Runs
    num_accepted: Ints  # (rows,) drafts
    logprobs: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)
    scores: Mapping[int, PromptScores] = field(default_factory=dict)
    hidden_states: Mapping[int, Floats] = field(default_factory=dict)  # (tokens, hidden_size) of each row
    errors: Mapping[int, BaseException] = field(default_factory=dict)
    took_ns: Sequence[int] = ()  # of each one if these are several steps

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


class _BrokenRule(Exception):
    """Says which rule an executor broke, and how."""

    def __init__(self, rule: str, how: str) -> None:
        super().__init__(f"broke the rule {rule!r}: {how}")


def verify_output(name: str, step: StepInput, output: object, *, vocab_size: int) -> StepOutput:
    """Return `output` if it answers `step`.

    Raises EngineError with the name of the executor and of the rule that it broke. About five array
    operations for a step without drafts, errors and log-probabilities.
    """
    try:
        if not isinstance(output, StepOutput):
            raise _BrokenRule("an executor returns a StepOutput", f"it returned {type(output).__name__}")
        if output.step != step.step:
            raise _BrokenRule(
                "outputs come in the order of their steps",
                f"it returned {output.step!r} for step {step.step}",
            )
        if _is_plain(step, output, vocab_size):
            return output
        _check_rows(output.errors, "error", len(step.seats))
        _check_tokens(step, output, vocab_size)
        for what, found in (("log-probabilities", output.logprobs), ("scores", output.scores)):
            _check_rows(found, what, len(step.seats))
        if step.hidden_rows is not None or output.hidden_states != {}:
            _check_hidden(step, output)
    except _BrokenRule as broken:
        raise EngineError(f"{name} {broken}") from None
    return output


def _is_plain(step: StepInput, output: StepOutput, vocab_size: int) -> bool:
    """Whether an output is a token for each sampled row and step, all in the vocabulary, and nothing else."""
    import numpy as np

    if step.drafts is not None or step.hidden_rows is not None or output.errors != {}:
        return False
    if output.logprobs != {} or output.scores != {} or output.hidden_states != {}:
        return False
    try:
        ids, counts = output.tokens.ids, output.tokens.counts
        return bool(
            ids.dtype == counts.dtype == np.int32
            and counts.shape == output.num_accepted.shape == step.seats.shape
            and ids.shape == (np.count_nonzero(counts) * step.num_steps,)
            and not np.count_nonzero(counts != (step.is_sampled if step.num_steps == 1 else step.num_new))
            and not np.count_nonzero(ids.view(np.uint32) >= vocab_size)  # a negative one is huge
        )
    except AttributeError:  # not arrays
        return False


def _check_rows(found: Mapping[int, Any], what: str, num_rows: int) -> None:
    if not isinstance(found, Mapping):
        raise _BrokenRule(f"{what} come by row", f"it returned {type(found).__name__}")
    for row, value in found.items():
        if type(row) is not int or not 0 <= row < num_rows:
            raise _BrokenRule(
                "rows are those of the step", f"it returned {what} of {row!r} of {num_rows} rows"
            )
        if what == "error" and not isinstance(value, BaseException):
            raise _BrokenRule("an error is an exception", f"that of row {row} is {value!r}")
        if what == "scores" and not isinstance(value, PromptScores):
            raise _BrokenRule("scores are PromptScores", f"those of row {row} are {type(value).__name__}")


def _check_hidden(step: StepInput, output: StepOutput) -> None:
    import numpy as np

    _check_rows(output.hidden_states, "hidden states", len(step.seats))
    counts = output.tokens.counts
    is_asked = np.zeros(len(counts), np.bool_) if step.hidden_rows is None else step.hidden_rows
    wanted, found = np.flatnonzero(is_asked & (counts > 0)).tolist(), sorted(output.hidden_states)
    if found != wanted:
        raise _BrokenRule(
            "hidden states are of the rows that ask for them and have tokens",
            f"it returned those of rows {found}, and they are wanted of {wanted}",
        )
    for row, states in output.hidden_states.items():
        shape: tuple[int, ...] = getattr(states, "shape", ())
        if len(shape) != 2 or shape[0] != counts[row]:
            raise _BrokenRule(
                "each token of a row that asks has a hidden state",
                f"row {row} has {counts[row]} tokens, and hidden states of shape {shape}",
            )


def _check_tokens(step: StepInput, output: StepOutput, vocab_size: int) -> None:
    import numpy as np

    if not isinstance(output.tokens, Runs):
        raise _BrokenRule("tokens are Runs", f"it returned {type(output.tokens).__name__}")
    ids, counts, num_rows = output.tokens.ids, output.tokens.counts, len(step.seats)
    _check_integers("ids", ids, np.size(ids))
    _check_integers("counts", counts, num_rows)
    _check_integers("num_accepted", output.num_accepted, num_rows)
    _check_counts(step, output)
    if int(counts.sum()) != len(ids):
        raise _BrokenRule("counts cover all tokens", f"they cover {counts.sum()} of {len(ids)}")
    outside = (ids < 0) | (ids >= vocab_size)
    if np.count_nonzero(outside):
        raise _BrokenRule(
            "a token is in the vocabulary", f"it returned {ids[outside][0]}; there are {vocab_size} tokens"
        )


def _check_counts(step: StepInput, output: StepOutput) -> None:
    import numpy as np

    counts = output.tokens.counts
    least = step.is_sampled * np.int32(step.num_steps)
    if output.errors:
        least[list(output.errors)] = 0
    most = least if step.drafts is None else least * (1 + step.drafts.counts)
    is_wrong = (counts < least) | (counts > most)
    if np.count_nonzero(is_wrong):
        row = int(np.flatnonzero(is_wrong)[0])
        raise _BrokenRule(
            "a sampled row has one token and those of accepted drafts, any other none",
            f"row {row} has {counts[row]}; possible is {int(least[row])} … {int(most[row])}",
        )
    if step.drafts is not None and np.count_nonzero(output.num_accepted != np.maximum(counts, 1) - 1):
        raise _BrokenRule("one token more than accepted drafts", "num_accepted does not fit the tokens")


def _check_integers(name: str, values: object, length: int) -> None:
    shape, kind = getattr(values, "shape", None), getattr(getattr(values, "dtype", None), "kind", "")
    if shape != (length,) or kind not in ("i", "u"):
        raise _BrokenRule(
            "tokens and counts are arrays of integers",
            f"{name} is a {type(values).__name__} of shape {shape}; it must be integers of shape ({length},)",
        )
