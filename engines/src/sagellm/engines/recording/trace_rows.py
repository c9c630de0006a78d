"""The lines of our own trace format, which docs/traces.md specifies; `sagellm.lab.traces` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sagellm.core import TraceRequest

FORMAT = "sagellm-trace"
VERSION = 1
RECORDING = "recording"
"""In the first line: the name of a recording, whose block ids come with what their blocks agree in."""


class Row(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The line of one request; what is unknown is left out.

    `agrees` is the place of a block among those of prompt and output, the id of a block that may stand there
    instead, and the number of tokens with which both begin.
    """

    arrival_s: float
    token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None  # where there are no token ids
    num_output_tokens: int
    output_token_ids: list[int] | None = None
    block_ids: list[int] | None = None
    output_block_ids: list[int] | None = None
    agrees: tuple[int, int, int] | None = None
    tenant: str = ""
    conversation: str = ""
    turn: int | None = None
    priority: int = 0
    max_tokens: int | None = None
    params: dict[str, float] | None = None
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None


def head_of(block_tokens: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first line."""
    return {"format": FORMAT, "version": VERSION, "block_tokens": block_tokens, **about}


def row_of(request: TraceRequest, agreement: tuple[int, int, int] | None = None) -> dict[str, Any]:
    """Return the line of a request as a dict. Stand-ins of tokens are left out."""
    has_tokens = len(request.token_ids) > 0 and not request.block_ids
    row = Row(
        arrival_s=round(request.arrival_s, 6),
        token_ids=request.token_ids.tolist() if has_tokens else None,
        num_prompt_tokens=None if has_tokens else request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        output_token_ids=(request.output_token_ids.tolist() or None) if has_tokens else None,
        block_ids=list(request.block_ids) or None,
        output_block_ids=list(request.output_block_ids) or None,
        agrees=agreement,
        tenant=request.tenant,
        conversation=request.conversation,
        turn=request.turn,
        priority=request.priority,
        max_tokens=request.max_tokens,
        params=dict(request.params) or None,
        finish_reason=request.finish_reason,
        num_cached_tokens=request.num_cached_tokens,
        ttft_s=request.ttft_s,
        total_s=request.total_s,
    )
    made: dict[str, Any] = msgspec.to_builtins(row)
    return made
