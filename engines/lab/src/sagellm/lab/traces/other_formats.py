"""Writes traces in the formats of others."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sagellm.core import ConfigError, TraceRequest
from sagellm.lab.files import write_json_lines, write_text_lines
from sagellm.lab.simulation.prompts import prompt_tokens
from sagellm.lab.traces.azure import HEAD
from sagellm.lab.traces.mooncake import BLOCK_TOKENS

_START = datetime(2000, 1, 1, tzinfo=UTC)


def write_mooncake(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write Mooncake's lines, with ids of 512 tokens numbered from 0.

    Raises ConfigError for requests of which only lengths are known.
    """
    numbers: dict[tuple[str, bytes], int] = {}

    def row(request: TraceRequest) -> dict[str, Any]:
        if not len(request.token_ids) and not request.block_ids:
            raise ConfigError(
                "Mooncake's lines name blocks, and this trace has lengths alone; convert it to azure or "
                "sagellm"
            )
        data, hash_ids, state = prompt_tokens(request).data, [], blake2b(digest_size=16)
        for start in range(0, 4 * request.num_prompt_tokens, 4 * BLOCK_TOKENS):
            state.update(data[start : min(start + 4 * BLOCK_TOKENS, 4 * request.num_prompt_tokens)])
            hash_ids.append(numbers.setdefault((request.tenant, state.digest()), len(numbers)))
        return {
            "timestamp": round(1e3 * request.arrival_s),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": hash_ids,
        }

    write_json_lines(path, map(row, requests), "trace", is_packed=True)


def write_azure(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write Azure's CSV, which starts in the year 2000 and has lengths alone."""

    def line(request: TraceRequest) -> str:
        moment = _START + timedelta(seconds=request.arrival_s)
        return f"{moment:%Y-%m-%d %H:%M:%S.%f},{request.num_prompt_tokens},{request.num_output_tokens}"

    write_text_lines(path, [",".join(HEAD), *map(line, requests)], "trace")
