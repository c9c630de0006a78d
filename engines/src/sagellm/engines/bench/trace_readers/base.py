"""The contract of a trace reader, and one request of a trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from sagellm.core import InvalidInputError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Prompts that begin with the same `block_ids` begin with the same tokens, `block_tokens` for each
    id; formats that record no content have none.
    """

    arrival_s: float  # of the trace's own clock
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0


class TraceReaderProtocol(ABC):
    """Reads one format of traces.

    `can_read` is asked with the name of a file, without what a compression adds to it, and its first
    line; then `read` is called once with the open text file. A reader opens nothing, keeps nothing
    and yields while it reads, so that a part of a long trace costs a part of its time.
    """

    @abstractmethod
    def can_read(self, name: str, first_line: str) -> bool:
        """Say whether a file looks like this format."""

    @abstractmethod
    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the requests in the file's order. Raises InvalidInputError that names the line."""


def whole_number(value: object, what: str, line: int) -> int:
    """Read a count of tokens. Raises InvalidInputError."""
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise InvalidInputError(f"line {line}: {what} is {value!r}; it must be a whole number of tokens")
    return number
