"""The engine: generates tokens for the front, which tokenizes prompts and turns output into text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from sagellm.core.errors import EngineError, InvalidInputError
from sagellm.core.ids import SequenceId
from sagellm.core.protocols.logits_processor import ExtraArg
from sagellm.core.request import FinishReason, Request

if TYPE_CHECKING:
    from sagellm.core.kv_layout import KVLayout
    from sagellm.core.protocols.model_spec import ModelGeometry

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Buckets of `steps_by_tokens`: inclusive upper bounds of the tokens that a step computes."""


@dataclass(kw_only=True)
class EngineMetrics:
    """A snapshot of an engine: its own counts, then each module's under its kind."""

    num_running: int = 0
    num_waiting: int = 0
    num_preparing: int = 0  # sequences whose structured output is being compiled; they do not wait yet
    num_deferred: int = 0  # of those that wait, the ones held back by a pass or by KV that is being fetched
    num_finished: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0  # in all steps
    # Steps that computed something, by STEP_TOKEN_BOUNDS, and those above the last bound.
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    modules: dict[str, Any] = field(default_factory=dict)

    @property
    def num_held_blocks(self) -> int:
        """KV blocks held by requests: blocks in use, less those that are cached and not locked."""
        pool, cache = self.modules.get("kv_pool"), self.modules.get("prefix_cache")
        reclaimable = getattr(cache, "num_blocks", 0) - getattr(cache, "num_locked_blocks", 0)
        return max(0, getattr(pool, "num_used_blocks", 0) - reclaimable)


class SampledToken(NamedTuple):
    """A token and, if requested, log-probabilities: its own and the most likely ones, best first.

    `rank` is the number of tokens that are at least as likely, itself included.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    rank: int | None = None


class PromptScore(NamedTuple):
    """Log-probabilities at one token of a prompt: its own, then those of the most likely ones, best first."""

    values: tuple[float, ...]  # (1 + top,)
    rank: int  # of the token, as a SampledToken's
    top_ids: tuple[int, ...]  # (top,)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The PromptScore of consecutive tokens, packed: a request may have millions of log-probabilities."""

    num_top: int
    ranks: bytes  # (tokens,) int32
    values: bytes  # (tokens, 1 + num_top) float64
    top_ids: bytes  # (tokens, num_top) int32

    def __post_init__(self) -> None:
        num_bytes = len(self.ranks), len(self.values), len(self.top_ids)
        if num_bytes != (4 * len(self), 8 * len(self) * (1 + self.num_top), 4 * len(self) * self.num_top):
            raise InvalidInputError(
                f"prompt scores have {num_bytes} bytes of ranks, values and ids, which are not those of the "
                f"same tokens with {self.num_top} others each"
            )

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __getitem__(self, index: int) -> PromptScore:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no score {index} of {len(self)}")
        num_top = self.num_top
        values = unpack_from(f"={1 + num_top}d", self.values, 8 * index * (1 + num_top))
        top_ids = unpack_from(f"={num_top}i", self.top_ids, 4 * index * num_top)
        return PromptScore(values, unpack_from("=i", self.ranks, 4 * index)[0], top_ids)

    @classmethod
    def joined(cls, parts: Sequence[PromptScores]) -> Self:
        """Return the scores of consecutive parts of a prompt, which have the same `num_top`."""
        num_top = parts[0].num_top if parts else 0
        if any(part.num_top != num_top for part in parts):
            raise InvalidInputError(f"prompt scores have {[part.num_top for part in parts]} others each")
        columns = ("ranks", "values", "top_ids")
        return cls(num_top, *(b"".join(getattr(part, name) for part in parts) for name in columns))


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One step's effect on one sequence: a run of new tokens, its end, or both.

    `logprobs` and `hidden_states` have an entry for each token, if the request asked for them. The first
    tokens come with the time at which the sequence was first scheduled, and with the prompt's
    log-probabilities, if requested, of each token but the first, which follows no other.
    """

    sequence_id: SequenceId
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it
    num_cached_tokens: int = 0
    error: str | None = None
    logprobs: Sequence[SampledToken] | None = None
    prompt_scores: PromptScores | None = None
    hidden_states: bytes | None = None  # (tokens, hidden_size) float32
    scheduled_ns: int | None = None  # of the clock that all processes of a machine share
    num_preemptions: int = 0  # of a sequence that has ended
    num_draft_tokens: int = 0  # verified in this step
    num_accepted_tokens: int = 0  # of those
    is_refused: bool = False  # `error` is the request's own, such as a schema that cannot be compiled


class EngineSequence(Protocol):
    """One validated continuation to generate: what an engine may read of it."""

    @property
    def sequence_id(self) -> SequenceId:
        """Unique among live sequences; outputs name it."""
        ...

    @property
    def request(self) -> Request:
        """The prompt's tokens, namespace, priority, and `max_tokens`, at which the sequence ends."""
        ...

    @property
    def params(self) -> Any:
        """The request's `sagellm.engines.SamplingParams`; the front handles its `n` and stop strings."""
        ...

    @property
    def seed(self) -> int:
        """The seed of this sequence's random numbers."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end it after `min_tokens`, including the model's end of sequence."""
        ...


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request may ask for. Its prompt and output must also fit into the total KV blocks."""

    vocab_size: int
    max_model_len: int
    max_model_len_reason: str = "the engine's own limit"
    num_blocks: int = 1 << 31
    block_size: int = 16
    eos_token_ids: frozenset[int] = frozenset()
    hidden_size: int = 0  # of the hidden states that requests may ask for; 0: they may not
    hidden_size_reason: str = "the engine does not return them"
    extra_args: tuple[ExtraArg, ...] = ()  # entries of a request's `extra_args` that the engine reads


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine reports about itself when it is made.

    `settings` are those that it chose itself, by dotted key (`{"model.dtype": "float32"}`).
    `default_params` are those of a request without parameters, by the names of `SamplingParams`. `refusals`
    says, by name, why forward backends that `auto` tried before the one in use are not used.
    """

    limits: RequestLimits
    settings: Mapping[str, Any] = field(default_factory=dict)
    default_params: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None  # transformers', if the engine has it; None: the front loads `model.tokenizer`
    geometry: ModelGeometry | None = None
    layout: KVLayout | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)


class EngineProtocol(ABC):
    """Generates the tokens of any number of sequences, step by step.

    Providers are called as `factory(config, registry=..., runtime=...)`; `config` is the whole
    `sagellm.engines.EngineConfig`. Making one loads the model. The front does the rest: it renders chats,
    tokenizes, checks requests against `info.limits`, makes one sequence for each continuation, turns
    tokens into text, and ends sequences at stop strings by `abort`.

    `add` only queues. `step` does not raise if one sequence fails or has parameters that the engine does
    not support: that sequence ends with the reason "error" and a message, and the others go on.
    Every sequence added ends in a step's outputs or by `abort`. One thread makes all calls.
    """

    info: EngineInfo

    @abstractmethod
    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence that passed all checks."""

    @abstractmethod
    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End sequences early; later steps return no outputs for them. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> Sequence[TokenOutput]:
        """Run one step and return an output for each sequence known to have got tokens or ended.

        An engine may have steps in flight, and then returns the results of an earlier one.
        """

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Say whether `step` has anything left to do."""

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """Return a snapshot."""

    def report_progress(self, beat: Callable[[], None]) -> None:  # noqa: B027  (short steps need none)
        """Have long steps call `beat` (0.2 µs) as they progress, at least once per second.

        The server itself calls it between steps. After a few seconds without a beat the engine counts as
        unresponsive; after `server.frozen_after_s` a served one is killed and restarted.
        """

    def watch_graphs(self, take: Callable[[Any], None]) -> None:
        """Have `take` called with the engine's ExecutionGraph of each later step.

        Raises EngineError by default.
        """
        raise EngineError(f"{type(self).__name__} does not lower its steps to execution graphs")

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of work that later steps would wait for, and say whether some is left.

        Called again and again while nothing waits or runs. By default there is none.
        """
        return False

    def close(self) -> None:  # noqa: B027  (most engines hold nothing but memory)
        """End all sequences and release files and connections; this is the last call."""


class NullEngine(EngineProtocol):
    """Accepts sequences and ends each at the next step, without tokens."""

    def __init__(self, config: object = None, *, registry: object = None, runtime: object = None) -> None:
        del config, registry, runtime
        self.info = EngineInfo(limits=RequestLimits(vocab_size=1 << 31, max_model_len=1 << 20))
        self._waiting: dict[SequenceId, EngineSequence] = {}
        self._metrics = EngineMetrics()

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence."""
        self._waiting[sequence.sequence_id] = sequence
        self._metrics.num_prompt_tokens += len(sequence.request.token_ids)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """Forget sequences."""
        for sequence_id in sequence_ids:
            self._metrics.num_finished += self._waiting.pop(sequence_id, None) is not None

    def step(self) -> Sequence[TokenOutput]:
        """End all queued sequences."""
        ended = [TokenOutput(sequence_id, finish_reason="length") for sequence_id in self._waiting]
        self._waiting.clear()
        self._metrics.num_finished += len(ended)
        return ended

    def has_unfinished(self) -> bool:
        """Whether a sequence is queued."""
        return bool(self._waiting)

    def metrics(self) -> EngineMetrics:
        """Return the counts."""
        self._metrics.num_waiting = len(self._waiting)
        return self._metrics
