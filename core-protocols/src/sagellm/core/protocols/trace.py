"""Recorded or simulated load: when requests arrived, what they asked for, and what they shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from sagellm.core.request import FinishReason
from sagellm.core.tokens import EMPTY, TokenIds

Tokenize = Callable[[str], Sequence[int]]
"""Converts text to token ids, for formats that record text."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    What is known about the prompt depends on the format: its `token_ids`; or `block_ids`, where prompts
    that begin with the same ids begin with the same tokens, `block_tokens` per id, perhaps fewer for the last
    one; or only its length. Where there are both, the token ids are stand-ins: they agree where the prompts'
    tokens do, and say nothing else about them. The same holds for the output, of which `output_token_ids` are
    what a cache keeps, all but the last one, or all that is known.

    What follows `priority` is what became of the request where it was recorded; None if it is not known.
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
    max_tokens: int | None = None  # at which it was to end
    params: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parameters of sampling that are not the default, by their names in the API."""
    turn: int | None = None  # of its conversation, from 1
    finish_reason: FinishReason | None = None
    output_token_ids: TokenIds = EMPTY
    output_block_ids: tuple[int, ...] = ()
    """Of prompt and output together, behind the prompt's whole blocks; the last one may be partial."""
    num_cached_tokens: int | None = None  # of the prompt
    ttft_s: float | None = None  # from its arrival to its first token
    total_s: float | None = None  # from its arrival to its end


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
