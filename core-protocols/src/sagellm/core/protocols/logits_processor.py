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
    """One entry of a request's `extra_args` that a logits processor reads, and its allowed values.

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
    """What one sequence asks of logits processors; nothing by default.

    All token ids are in the vocabulary, except that a checkpoint may have `stop_token_ids` beyond it.
    `extra_args` are those that an active processor declares, each with an accepted value.
    """

    prompt_token_ids: TokenIds = EMPTY
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id → value added to its logit
    min_tokens: int = 0  # no stop token is chosen before this many output tokens
    stop_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that must not be completed
    extra_args: Mapping[str, Any] = field(default_factory=dict)


class LogitsRow(NamedTuple, Generic[State]):
    """A row of logits that a processor has to change."""

    row: int  # of the logits
    state: State  # what `start` returned for its sequence
    output_token_ids: Sequence[int]  # all that the sequence has generated; must not be kept or changed


@dataclass(kw_only=True)
class LogitsProcessorMetrics:
    """How much a processor was used."""

    num_sequences: int = 0  # those that asked for it
    num_rows: int = 0  # those given to it to change


class LogitsProcessorProtocol(ABC, Generic[State]):
    """Changes the logits of the sequences that ask for it; others cost nothing.

    Providers are called as `factory(vocab_size)`, once an engine. The sampler calls `start` when a
    sequence is sampled for the first time, and from then on `apply` for the rows of those sequences
    for which `start` returned a state, all of a batch at once. The state belongs to the sequence and
    is dropped with it; a processor itself keeps nothing about a sequence, so it need not be notified
    of ends, aborts and preemptions.

    A step may be run again, as a whole or in parts, and a sequence may be in any batch: the
    result for a row depends only on its logits, state and output, and `apply` changes
    neither state nor output. One thread makes all calls. `start` may take milliseconds, `apply` a few
    microseconds per row and a few tensor operations per call. An exception ends the sequence that
    caused it, with the reason "error".
    """

    def extra_args(self) -> Sequence[ExtraArg]:
        """Return the entries of `LogitsRequest.extra_args` that it reads; none by default.

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
    """Not used by any sequence."""

    def __init__(self, vocab_size: int = 1) -> None:
        del vocab_size

    def start(self, request: LogitsRequest) -> None:
        """Return None for every request."""

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow[None]]) -> None:
        """Change nothing."""

    def metrics(self) -> LogitsProcessorMetrics:
        """Return zeros."""
        return LogitsProcessorMetrics()
