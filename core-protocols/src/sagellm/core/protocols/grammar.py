"""Which tokens may follow, if the text of an output must match a schema, a pattern or a grammar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from sagellm.core.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words = npt.NDArray[np.uint32]

CompiledText = TypeVar("CompiledText")
GrammarState = TypeVar("GrammarState")

StructureKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
"""What a text describes: a JSON schema, any JSON object (the text is empty), a regular expression, a JSON
list of texts, an EBNF grammar whose start is `root`, or tags and what stands between them as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A model's tokens by id. It holds no tensors, so that it can be sent to another process."""

    tokens: Sequence[bytes]  # (vocab_size,) each one's text, not UTF-8 if special; empty: unused or a stop
    stop_token_ids: frozenset[int]  # those that end a text; below vocab_size

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return -(-len(self.tokens) // 32)


@dataclass(kw_only=True)
class GrammarMetrics:
    """How much a provider was used."""

    num_prepared: int = 0  # texts that were compiled
    num_refused: int = 0  # texts that could not be
    num_started: int = 0  # sequences
    num_masks: int = 0


@dataclass(kw_only=True)
class StructuredOutputMetrics:
    """What requests for structured outputs asked for, and what that took."""

    num_preparing: int = 0  # sequences that wait for a grammar
    num_requested: dict[str, int] = field(default_factory=dict)  # sequences, by kind
    num_compiled: int = 0
    num_cached: int = 0  # sequences whose grammar was there
    num_refused: int = 0  # sequences whose grammar could not be compiled
    compile_ns: int = 0
    num_masks: int = 0
    mask_ns: int = 0
    provider: GrammarMetrics | None = None  # once there is one


class GrammarProtocol(ABC, Generic[CompiledText, GrammarState]):
    """Says which tokens may follow in a text that must match.

    Providers are called as `factory(vocabulary)`, when the first request needs one, outside the step
    thread. `prepare` compiles a text, also outside it, one call at a time. The core keeps what it returns for
    other requests with the same text, and calls `start` for each sequence. All calls with a state come from
    the step thread: `mask` before a token is drawn, `advance` when it is known. Drafts are walked by
    `advance`, a `mask` after each, and `rollback`.

    A mask has one bit for each token: bit `t % 32` of word `t // 32` says whether token `t` may follow. A
    stop token may follow where the text is complete; where nothing can continue it, only stop tokens may, and
    after one of them only stop tokens. `mask` and `advance` agree about every token. Preparing may take
    seconds, a mask 100 µs, all others a few microseconds per token.
    """

    @abstractmethod
    def prepare(self, kind: StructureKind, text: str) -> CompiledText:
        """Compile what outputs must match.

        Raises InvalidRequestError, which names what is wrong or not supported, or the limit that it exceeds.
        Nothing that it asks for is ignored.
        """

    @abstractmethod
    def start(self, compiled: CompiledText) -> GrammarState:
        """Return the state of a new sequence; states of the same text share nothing that changes."""

    @abstractmethod
    def mask(self, state: GrammarState, words: Words) -> bool:
        """Write which tokens may follow into `words` (num_words,). If it returns False, every token may."""

    @abstractmethod
    def advance(self, state: GrammarState, token_ids: Sequence[int]) -> int:
        """Append tokens up to the first that may not follow; return how many were appended."""

    @abstractmethod
    def rollback(self, state: GrammarState, num_tokens: int) -> None:
        """Remove the last tokens that were appended."""

    @abstractmethod
    def metrics(self) -> GrammarMetrics:
        """Return the counts so far."""

    def size_bytes(self, compiled: CompiledText) -> int:
        """Return the memory that a compiled text takes; the core keeps fewer of them if they are large."""
        return 0

    def close(self) -> None:
        """End processes and threads, and a `prepare` that runs; this is the last call, from any thread."""


class NullGrammar(GrammarProtocol[None, None]):
    """Compiles nothing: every request for a structured output is refused."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        del vocabulary
        self._metrics = GrammarMetrics()

    def prepare(self, kind: StructureKind, text: str) -> None:
        """Raise InvalidRequestError."""
        self._metrics.num_refused += 1
        raise InvalidRequestError(
            f"structured_outputs has {kind}, and this engine compiles none; name a provider in grammar.name"
        )

    def start(self, compiled: None) -> None:
        """Return None."""
        self._metrics.num_started += 1

    def mask(self, state: None, words: Words) -> bool:
        """Allow every token."""
        self._metrics.num_masks += 1
        return False

    def advance(self, state: None, token_ids: Sequence[int]) -> int:
        """Accept all tokens."""
        return len(token_ids)

    def rollback(self, state: None, num_tokens: int) -> None:
        """Do nothing."""

    def metrics(self) -> GrammarMetrics:
        """Return the counts."""
        return self._metrics
