"""Our own trace format, JSON lines, specified in docs/traces.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from sagellm.core import InvalidInputError, Tokenize, TraceReaderProtocol, TraceRequest, pack
from sagellm.core.tokens import EMPTY
from sagellm.lab.files import write_json_lines
from sagellm.lab.traces.lines import (
    check_covered,
    count_of_tokens,
    has_keys,
    ints_of,
    json_lines,
    number_of,
)

FORMAT = "sagellm-trace"
VERSION = 1


class SageLLMTraceReader(TraceReaderProtocol):
    """Reads what the simulator and the recorder write."""

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        del tokenize

    def can_read(self, name: str, first_line: str) -> bool:
        """Recognize the format by its header."""
        del name
        return has_keys(first_line, "format", "version") and json.loads(first_line)["format"] == FORMAT

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the lines after the header."""
        rows = json_lines(lines)
        line, head = next(rows, (1, {}))
        if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
            raise InvalidInputError(f"line {line}: the head is not {FORMAT} of version {VERSION}")
        block_tokens = count_of_tokens(head.get("block_tokens", 0), "block_tokens", line)
        for line, row in rows:
            yield _request(row, block_tokens, line)


def write_trace(
    path: str | os.PathLike[str], requests: Iterable[TraceRequest], about: Mapping[str, Any] | None = None
) -> None:
    """Write a trace, compressed if the name ends with .xz, .gz or .bz2; the header includes `about`.

    Raises ConfigError if the file cannot be written, InvalidInputError if requests have blocks of
    different sizes.
    """
    path, rows = Path(path), list(requests)
    sizes = {one.block_tokens for one in rows if one.block_ids}
    if len(sizes) > 1:
        raise InvalidInputError(f"a trace has blocks of one size, not of {sorted(sizes)} tokens")
    head = {"format": FORMAT, "version": VERSION, "block_tokens": max(sizes, default=0), **(about or {})}
    write_json_lines(path, (head, *map(_row, rows)), "trace", is_packed=True)


def _request(row: dict[str, Any], block_tokens: int, line: int) -> TraceRequest:
    token_ids = EMPTY
    num_prompt_tokens = row.get("num_prompt_tokens")
    if "token_ids" in row:
        try:
            token_ids = pack(ints_of(row["token_ids"], "token_ids", line))
        except InvalidInputError as error:
            raise InvalidInputError(f"line {line}: {error}") from error
        num_prompt_tokens = len(token_ids)
    block_ids = tuple(ints_of(row.get("block_ids", []), "block_ids", line))
    if block_ids and not block_tokens:
        raise InvalidInputError(f"line {line}: there are block_ids, and the head has no block_tokens")
    num_prompt_tokens = count_of_tokens(num_prompt_tokens, "num_prompt_tokens", line)
    check_covered(num_prompt_tokens, len(block_ids), block_tokens, "block_ids", line)
    return TraceRequest(
        number_of(row.get("arrival_s"), "arrival_s", line),
        num_prompt_tokens,
        count_of_tokens(row.get("num_output_tokens"), "num_output_tokens", line),
        block_ids,
        block_tokens if block_ids else 0,
        token_ids,
        tenant=str(row.get("tenant", "")),
        conversation=str(row.get("conversation", "")),
        priority=_priority(row.get("priority", 0), line),
    )


def _priority(value: object, line: int) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise InvalidInputError(f"line {line}: priority is {value!r}; it must be an int of 32 bits")
    return value


def _row(request: TraceRequest) -> dict[str, Any]:
    row: dict[str, Any] = {"arrival_s": round(request.arrival_s, 6)}
    if len(request.token_ids):
        row["token_ids"] = request.token_ids.tolist()
    else:
        row["num_prompt_tokens"] = request.num_prompt_tokens
    row["num_output_tokens"] = request.num_output_tokens
    optional = {
        "block_ids": list(request.block_ids),
        "tenant": request.tenant,
        "conversation": request.conversation,
        "priority": request.priority,
    }
    return row | {name: value for name, value in optional.items() if value}
