"""Turns what a trace knows about a prompt into token ids, so that the real matching code runs."""

from __future__ import annotations

import struct

from sagellm.core import InvalidInputError, TokenIds, TraceRequest

_LARGEST_ID = 2**31 - 1


def prompt_tokens(request: TraceRequest) -> TokenIds:
    """Return the prompt's tokens.

    A named block becomes `block_tokens` copies of its id, so blocks differ if their ids do. Raises
    InvalidInputError for a request of which only the length is known, and for ids beyond 31 bits.
    """
    if len(request.token_ids):
        return request.token_ids
    if not request.block_ids:
        raise InvalidInputError(
            "a request records neither token ids nor block ids; without them nothing says what prompts share"
        )
    smallest, largest = min(request.block_ids), max(request.block_ids)
    if smallest < 0 or largest > _LARGEST_ID:
        raise InvalidInputError(f"block ids are {smallest} … {largest}; they must be 0 … {_LARGEST_ID}")
    blocks = (struct.pack("i", block_id) * request.block_tokens for block_id in request.block_ids)
    return TokenIds(b"".join(blocks))


def kept_tokens(request: TraceRequest) -> TokenIds:
    """Return what a cache keeps of a request: its prompt and, if recorded, its output but for the last token.

    Raises as `prompt_tokens`.
    """
    prompt, output = prompt_tokens(request), request.output_token_ids
    return prompt + output[: request.num_output_tokens - 1] if len(output) else prompt
