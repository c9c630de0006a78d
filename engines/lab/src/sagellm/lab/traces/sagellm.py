"""Our own trace format, JSON lines, specified in docs/traces.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast, get_args

from sagellm.core import (
    FinishReason,
    InvalidInputError,
    TokenIds,
    Tokenize,
    TraceReaderProtocol,
    TraceRequest,
    pack,
)
from sagellm.engines.recording.trace_rows import FORMAT, RECORDING, VERSION, head_of, row_of
from sagellm.lab.files import write_json_lines
from sagellm.lab.traces.anonymous import AnonymousRows
from sagellm.lab.traces.lines import (
    check_covered,
    count_of_tokens,
    first_object,
    ints_of,
    json_lines,
    number_of,
    seconds_of,
)
from sagellm.lab.traces.stand_ins import StandIns

_MAX_BLOCK_TOKENS = 1 << 20


class SageLLMTraceReader(TraceReaderProtocol):
    """Reads what the simulator and the recorder write.

    The files of one recording may follow one another. The last line may be torn, as a process leaves it that
    was killed: it is left out, which is logged.
    """

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        del tokenize

    def can_read(self, name: str, first_line: str) -> bool:
        """Recognize the format by its header."""
        del name
        return first_object(first_line).get("format") == FORMAT

    def read(self, lines: IO[str]) -> Iterator[TraceRequest]:
        """Yield the lines after the header."""
        rows = json_lines(lines, may_be_torn=True)
        line, head = next(rows, (1, {}))
        if (head.get("format"), head.get("version")) != (FORMAT, VERSION):
            raise InvalidInputError(f"line {line}: the head is not {FORMAT} of version {VERSION}")
        block_tokens = count_of_tokens(head.get("block_tokens", 0), "block_tokens", line)
        if block_tokens > _MAX_BLOCK_TOKENS:
            raise InvalidInputError(
                f"line {line}: block_tokens is {block_tokens}; it must be at most {_MAX_BLOCK_TOKENS}"
            )
        stand_ins = StandIns(block_tokens) if RECORDING in head else None
        for line, row in rows:
            if "format" in row:
                _check_same_recording(head, row, line)
            else:
                yield _request(row, block_tokens, stand_ins, line)


def write_trace(
    path: str | os.PathLike[str], requests: Iterable[TraceRequest], about: Mapping[str, Any] | None = None
) -> None:
    """Write a trace, compressed if the name ends with .xz, .gz or .bz2; the header includes `about`.

    Blocks that were recorded get new names. Raises ConfigError if the file cannot be written,
    InvalidInputError if requests have blocks of different sizes.
    """
    path, rows = Path(path), list(requests)
    sizes = {one.block_tokens for one in rows if one.block_ids}
    if len(sizes) > 1:
        raise InvalidInputError(f"a trace has blocks of one size, not of {sorted(sizes)} tokens")
    if any(one.block_ids and len(one.token_ids) for one in rows):
        write_anonymous(path, rows, max(sizes), about)
        return
    head = head_of(max(sizes, default=0), about or {})
    write_json_lines(path, (head, *map(row_of, rows)), "trace", is_packed=True)


def write_anonymous(
    path: Path,
    requests: Iterable[TraceRequest],
    block_tokens: int,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a trace without tokens: blocks, tenants and conversations have salted names, as recorded ones do.

    Raises ConfigError if the file cannot be written.
    """
    head = head_of(block_tokens, {RECORDING: os.urandom(8).hex(), **(about or {})})
    names = AnonymousRows(block_tokens)
    write_json_lines(path, chain([head], map(names.row, requests)), "trace", is_packed=True)


def _check_same_recording(head: dict[str, Any], other: dict[str, Any], line: int) -> None:
    names = ("format", "version", "block_tokens", RECORDING)
    if RECORDING not in head or any(head.get(name) != other.get(name) for name in names):
        raise InvalidInputError(
            f"line {line}: another trace begins here; its times and blocks are not those of the first, so "
            "read each by itself"
        )


def _request(row: dict[str, Any], block_tokens: int, stand_ins: StandIns | None, line: int) -> TraceRequest:
    token_ids = _tokens(row, "token_ids", line)
    output_token_ids = _tokens(row, "output_token_ids", line)
    num_prompt_tokens = len(token_ids) if "token_ids" in row else row.get("num_prompt_tokens")
    block_ids = tuple(ints_of(row.get("block_ids", []), "block_ids", line))
    output_block_ids = tuple(ints_of(row.get("output_block_ids", []), "output_block_ids", line))
    if block_ids and not block_tokens:
        raise InvalidInputError(f"line {line}: there are block_ids, and the head has no block_tokens")
    num_prompt_tokens = count_of_tokens(num_prompt_tokens, "num_prompt_tokens", line)
    num_output_tokens = count_of_tokens(row.get("num_output_tokens"), "num_output_tokens", line)
    check_covered(num_prompt_tokens, len(block_ids), block_tokens, "block_ids", line)
    if stand_ins is not None and block_ids and not len(token_ids):
        token_ids, output_token_ids = stand_ins.of(
            block_ids,
            output_block_ids,
            _agreement(row.get("agrees"), line),
            num_prompt_tokens,
            num_prompt_tokens + max(0, num_output_tokens - 1),
        )
    return TraceRequest(
        number_of(row.get("arrival_s"), "arrival_s", line),
        num_prompt_tokens,
        num_output_tokens,
        block_ids,
        block_tokens if block_ids else 0,
        token_ids,
        tenant=str(row.get("tenant", "")),
        conversation=str(row.get("conversation", "")),
        priority=_priority(row.get("priority", 0), line),
        max_tokens=_optional(row, "max_tokens", count_of_tokens, line),
        params=_params(row.get("params", {}), line),
        turn=_optional(row, "turn", count_of_tokens, line),
        finish_reason=_finish_reason(row.get("finish_reason"), line),
        output_token_ids=output_token_ids,
        output_block_ids=output_block_ids,
        num_cached_tokens=_num_cached_tokens(row, num_prompt_tokens, line),
        ttft_s=_optional(row, "ttft_s", seconds_of, line),
        total_s=_optional(row, "total_s", seconds_of, line),
    )


def _tokens(row: dict[str, Any], name: str, line: int) -> TokenIds:
    try:
        return pack(ints_of(row.get(name, []), name, line))
    except InvalidInputError as error:
        raise InvalidInputError(f"line {line}: {error}") from error


def _num_cached_tokens(row: dict[str, Any], num_prompt_tokens: int, line: int) -> int | None:
    num: int | None = _optional(row, "num_cached_tokens", count_of_tokens, line)
    if num is not None and num > num_prompt_tokens:
        raise InvalidInputError(
            f"line {line}: num_cached_tokens is {num}, and the prompt has {num_prompt_tokens} tokens"
        )
    return num


def _optional(row: dict[str, Any], name: str, read: Callable[[object, str, int], Any], line: int) -> Any:
    value = row.get(name)
    return None if value is None else read(value, name, line)


def _agreement(value: object, line: int) -> tuple[int, int, int] | None:
    if value is None:
        return None
    numbers = ints_of(value, "agrees", line)
    if len(numbers) != 3 or min(numbers) < 0:
        raise InvalidInputError(f"line {line}: agrees is {value!r:.60}; it must be [place, block id, tokens]")
    return numbers[0], numbers[1], numbers[2]


def _params(value: object, line: int) -> dict[str, float]:
    if not isinstance(value, dict):
        raise InvalidInputError(f"line {line}: params is {value!r:.60}; it must be an object of numbers")
    return {
        name: float(each) if isinstance(each, bool) else number_of(each, f"params.{name:.60}", line)
        for name, each in value.items()
    }


def _finish_reason(value: object, line: int) -> FinishReason | None:
    if value is None or value in get_args(FinishReason):
        return cast(FinishReason | None, value)
    raise InvalidInputError(
        f"line {line}: finish_reason is {value!r:.60}; it must be one of {', '.join(get_args(FinishReason))}"
    )


def _priority(value: object, line: int) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise InvalidInputError(f"line {line}: priority is {value!r}; it must be an int of 32 bits")
    return value
