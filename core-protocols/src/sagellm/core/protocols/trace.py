"""Recorded or simulated load: when requests arrived, what they asked for, and what they shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from sagellm.core.tokens import EMPTY, TokenIds

Tokenize = Callable[[str], Sequence[int]]
"""Converts text to token ids, for formats that record text."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    What is known about the prompt depends on the format: its `token_ids`; or `block_ids`, where prompts
    that begin with the same ids begin with the same tokens, `block_tokens` per id, perhaps fewer for the last
    one; or only its length.
    """

    arrival_s: float  # of the trace's own clock
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    token_ids: TokenIds = EMPTY
    tenant: str = ""
    conversation: str = ""
    """Requests with the same id, if known, are turns of one conversation."""
    priority: int = 0  # larger is more urgent


class TraceReaderProtocol(ABC):
    """Reads one format of traces.

    Providers are called as `factory(tokenize=...)`. `can_read` is called with the name of a file,
    without the suffix of a compression, and its first line; then `read` is called once with the
    open text file. A reader opens nothing, keeps nothing of a file and yields while it reads, so
    that reading a part of a long trace costs only that part of the time.
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
        """Return False."""
        del name, first_line
        return False

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield nothing."""
        del lines
        return iter(())
