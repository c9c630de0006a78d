"""Changes to the logits of single sequences, between the penalties and the temperature."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from sagellm.core.tokens import EMPTY, TokenIds

if TYPE_CHECKING:
    import torch

State = TypeVar("State")

_TYPES: Mapping[str, type | tuple[type, ...]] = {"bool": bool, "int": int, "float": (int, float), "str": str}
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a finite number", "str": "a text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraArg:
    """One entry of a request's `extra_args` that a logits processor reads, and what its value may be.

    `minimum` and `maximum` bound a number, inclusively. With `is_list` the value is a list of such values.
    """

    name: str
    type: Literal["bool", "int", "float", "str"]
    summary: str = ""  # what it does, for people
    is_list: bool = False
    minimum: float | None = None
    maximum: float | None = None

    def accepts(self, value: object) -> bool:
        """Say whether a value is allowed."""
        if self.is_list:
            return isinstance(value, list | tuple) and all(map(self._accepts_one, value))
        return self._accepts_one(value)

    @property
    def possible(self) -> str:
        """The allowed values in words: `a whole number of at least 2`."""
        words = _WORDS[self.type]
        if self.minimum is not None:
            words += f" of at least {self.minimum:g}"
        if self.maximum is not None:
            words += f"{' and' if self.minimum is not None else ' of'} at most {self.maximum:g}"
        return f"a list, each {words}" if self.is_list else words

    def _accepts_one(self, value: object) -> bool:
        if isinstance(value, bool) != (self.type == "bool") or not isinstance(value, _TYPES[self.type]):
            return False
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        return low <= value <= high and (isinstance(value, int) or math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRequest:
    """What one sequence asks of logits processors; by default, nothing.

    All token ids are in the vocabulary, except that a checkpoint may have `stop_token_ids` beyond it.
    `extra_args` are those that an active processor declares, each with a value that it accepts.
    """

    prompt_token_ids: TokenIds = EMPTY
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id → what is added to its logit
    min_tokens: int = 0  # before so many output tokens no stop token is chosen
    stop_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # never to be completed
    extra_args: Mapping[str, Any] = field(default_factory=dict)


class LogitsRow(NamedTuple, Generic[State]):
    """A row of logits that a processor has to change."""

    row: int  # of the logits
    state: State  # what `start` returned for its sequence
    output_token_ids: Sequence[int]  # all that the sequence has generated; not to be kept or changed


@dataclass(kw_only=True)
class LogitsProcessorMetrics:
    """How much a processor was used."""

    num_sequences: int = 0  # that asked for it
    num_rows: int = 0  # that it was given to change


class LogitsProcessorProtocol(ABC, Generic[State]):
    """Changes the logits of those sequences that ask for it; all others cost it nothing.

    Providers are called as `factory(vocab_size)`, once an engine. The sampler calls `start` when a
    sequence is sampled for the first time, and from then on `apply` for the rows of those sequences
    for which `start` returned a state, all of a batch at once. The state belongs to the sequence and
    is dropped with it; a processor keeps nothing of a sequence itself, so that nobody has to tell it
    of ends, aborts and preemptions.

    A step may be run again, as a whole or in parts, and one sequence may be in any batch: what
    becomes of a row depends on its logits, its state and its output alone, and `apply` changes
    neither state nor output. One thread makes all calls. `start` may take milliseconds, `apply` some
    microseconds a row and a few tensor operations a call. What they raise ends the sequence that
    caused it, with the reason "error".
    """

    def extra_args(self) -> Sequence[ExtraArg]:
        """Return the entries of `LogitsRequest.extra_args` that it reads; none, unless overridden.

        Called once, when the engine starts. A request with an entry that no processor declares, or with a
        value that its declaration does not allow, is refused before it runs.
        """
        return ()

    @abstractmethod
    def start(self, request: LogitsRequest) -> State | None:
        """Return what `apply` needs to know of a sequence, or None if it asks for nothing here."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[State]]) -> None:
        """Change the given rows of logits (rows, vocab) in place, and no others.

        The logits are float32 and contiguous, on any device; penalties have been applied. A token is
        forbidden by -inf. `rows` is not empty and names no row twice.
        """

    @abstractmethod
    def metrics(self) -> LogitsProcessorMetrics:
        """Return the counts so far."""


class NullLogitsProcessor(LogitsProcessorProtocol[None]):
    """Is asked for by no sequence."""

    def __init__(self, vocab_size: int = 1) -> None:
        del vocab_size

    def start(self, request: LogitsRequest) -> None:
        """Return None, whatever is asked for."""

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[None]]) -> None:
        """Change nothing."""

    def metrics(self) -> LogitsProcessorMetrics:
        """Return zeros."""
        return LogitsProcessorMetrics()
