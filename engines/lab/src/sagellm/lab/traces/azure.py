"""The CSV of the Azure Public Dataset (LLM inference): TIMESTAMP, ContextTokens, GeneratedTokens."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO

from sagellm.core import InvalidInputError, Tokenize, TraceReaderProtocol, TraceRequest
from sagellm.lab.traces.lines import count_of_tokens

HEAD = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns."""


class AzureTraceReader(TraceReaderProtocol):
    """Reads the Azure traces of 2023 and 2024."""

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        del tokenize

    def can_read(self, name: str, first_line: str) -> bool:
        """Recognize the format by its header."""
        del name
        return tuple(first_line.strip().split(",")) == HEAD

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the rows."""
        for line, row in enumerate(csv.DictReader(iter(lines.readline, "")), 2):
            when, num_prompt, num_output = (row.get(name) for name in HEAD)
            yield TraceRequest(
                _seconds(when or "", line),
                count_of_tokens(num_prompt, HEAD[1], line),
                count_of_tokens(num_output, HEAD[2], line),
            )


def _seconds(text: str, line: int) -> float:
    """Read `2023-11-16 18:15:46.6805900`; without a zone it is UTC."""
    whole, dot, fraction = text.partition(".")
    digits, zone = (fraction.partition("+")[0], fraction.partition("+")[2]) if dot else ("", "")
    try:
        moment = datetime.fromisoformat(f"{whole}+{zone}" if zone else whole)
        part = float(f"0.{digits}") if digits else 0.0
    except ValueError:
        raise InvalidInputError(f"line {line}: TIMESTAMP is {text!r}; it must be a date and time") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() + part
