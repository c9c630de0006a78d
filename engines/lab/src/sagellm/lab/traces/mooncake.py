"""The Mooncake traces: one object per line with timestamp (ms), input_length, output_length, hash_ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from sagellm.core import Tokenize, TraceReaderProtocol, TraceRequest
from sagellm.lab.traces.lines import (
    check_covered,
    count_of_tokens,
    first_object,
    ints_of,
    json_lines,
    number_of,
)

BLOCK_TOKENS = 512
"""Tokens per hash id."""


class MooncakeTraceReader(TraceReaderProtocol):
    """Reads what the Mooncake project published (FAST '25); `hash_ids` may be missing."""

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        del tokenize

    def can_read(self, name: str, first_line: str) -> bool:
        """Recognize the format by its keys."""
        del name
        return {"timestamp", "input_length"} <= first_object(first_line).keys()

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the lines that are not blank."""
        for line, row in json_lines(lines):
            hash_ids = ints_of(row.get("hash_ids", []), "hash_ids", line)
            num_prompt_tokens = count_of_tokens(row.get("input_length"), "input_length", line)
            check_covered(num_prompt_tokens, len(hash_ids), BLOCK_TOKENS, "hash_ids", line)
            yield TraceRequest(
                number_of(row.get("timestamp"), "timestamp", line) / 1e3,
                num_prompt_tokens,
                count_of_tokens(row.get("output_length"), "output_length", line),
                tuple(hash_ids),
                BLOCK_TOKENS if hash_ids else 0,
            )
