"""Recorded or simulated load: when requests came, what they asked, and what they had in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from sagellm.core.tokens import EMPTY, TokenIds

Tokenize = Callable[[str], Sequence[int]]
"""Text to token ids, for formats that record text."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    What is known of the prompt differs by format: its `token_ids`; or `block_ids`, by which prompts
    that begin with the same ids begin with the same tokens, `block_tokens` for each id, the last
    one perhaps partial; or its length alone.
    """

    arrival_s: float  # of the trace's own clock
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    token_ids: TokenIds = EMPTY
    tenant: str = ""
    conversation: str = ""
    """Requests with the same one, if it is known, are turns of one conversation."""


class TraceReaderProtocol(ABC):
    """Reads one format of traces.

    Providers are called as `factory(tokenize=...)`. `can_read` is asked with the name of a file,
    without what a compression adds to it, and its first line; then `read` is called once with the
    open text file. A reader opens nothing, keeps nothing of a file and yields while it reads, so
    that a part of a long trace costs a part of its time.
    """

    @abstractmethod
    def can_read(self, name: str, first_line: str) -> bool:
        """Say whether a file looks like this format."""

    @abstractmethod
    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the requests in the file's order. Raises InvalidInputError that names the line."""


class NullTraceReader(TraceReaderProtocol):
    """Knows no format."""

    def __init__(self, **_: object) -> None:
        pass

    def can_read(self, name: str, first_line: str) -> bool:
        """Know none."""
        del name, first_line
        return False

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield nothing."""
        del lines
        return iter(())
