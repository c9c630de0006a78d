"""The lines of our own trace format, which docs/traces.md specifies; `sagellm.lab.traces` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagellm.core import TraceRequest

FORMAT = "sagellm-trace"
VERSION = 1
RECORDING = "recording"
"""In the first line: the name of a recording, whose block ids come with what their blocks agree in."""

_OPTIONAL = (
    "tenant",
    "conversation",
    "turn",
    "priority",
    "max_tokens",
    "params",
    "finish_reason",
    "num_cached_tokens",
    "ttft_s",
    "total_s",
)
"""Fields of TraceRequest that are left out where they are unknown or the default."""


def head_of(block_tokens: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first line."""
    return {"format": FORMAT, "version": VERSION, "block_tokens": block_tokens, **about}


def row_of(request: TraceRequest, agreement: tuple[int, int, int] | None = None) -> dict[str, Any]:
    """Return the line of a request, of which stand-ins of tokens are left out.

    `agreement` is the place of a block among those of prompt and output, the id of a block that may stand
    there instead, and the number of tokens with which both begin.
    """
    row: dict[str, Any] = {"arrival_s": round(request.arrival_s, 6)}
    has_tokens = len(request.token_ids) > 0 and not request.block_ids
    if has_tokens:
        row["token_ids"] = request.token_ids.tolist()
    else:
        row["num_prompt_tokens"] = request.num_prompt_tokens
    row["num_output_tokens"] = request.num_output_tokens
    if has_tokens and len(request.output_token_ids):
        row["output_token_ids"] = request.output_token_ids.tolist()
    if request.block_ids:
        row["block_ids"] = list(request.block_ids)
    if request.output_block_ids:
        row["output_block_ids"] = list(request.output_block_ids)
    if agreement is not None:
        row["agrees"] = list(agreement)
    for name in _OPTIONAL:
        value = getattr(request, name)
        if value or (value == 0 and name in ("num_cached_tokens", "ttft_s", "total_s")):
            row[name] = round(value, 6) if isinstance(value, float) else value
    if "params" in row:
        row["params"] = dict(request.params)
    return row
