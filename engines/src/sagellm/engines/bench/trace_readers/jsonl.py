"""One JSON object a line: timestamp (ms), input_length, output_length, hash_ids (the Mooncake traces)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from sagellm.core import InvalidInputError
from sagellm.engines.bench.trace_readers.base import TraceReaderProtocol, TraceRequest, whole_number

BLOCK_TOKENS = 512  # a hash id of these traces names so many tokens


class JSONLTraceReader(TraceReaderProtocol):
    """Reads lines of JSON; `hash_ids` may be missing."""

    def can_read(self, name: str, first_line: str) -> bool:
        """Know the format by the name, or by an object with a timestamp in the first line."""
        return name.endswith(".jsonl") or ('"timestamp"' in first_line and first_line.startswith("{"))

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the lines that are not blank."""
        for line, text in enumerate(lines, 1):
            if text.strip():
                yield _request(_object(text, line), line)


def _object(text: str, line: int) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidInputError(f"line {line}: {text.strip()[:60]!r} is no JSON object")
    return found


def _request(row: dict[str, Any], line: int) -> TraceRequest:
    when, hash_ids = row.get("timestamp"), row.get("hash_ids", [])
    if isinstance(when, bool) or not isinstance(when, int | float):
        raise InvalidInputError(f"line {line}: timestamp is {when!r}; it must be a number of milliseconds")
    if not isinstance(hash_ids, list) or not all(isinstance(one, int) for one in hash_ids):
        raise InvalidInputError(f"line {line}: hash_ids is {hash_ids!r:.60}; it must be a list of numbers")
    return TraceRequest(
        when / 1000,
        whole_number(row.get("input_length"), "input_length", line),
        whole_number(row.get("output_length"), "output_length", line),
        tuple(hash_ids),
        BLOCK_TOKENS if hash_ids else 0,
    )
