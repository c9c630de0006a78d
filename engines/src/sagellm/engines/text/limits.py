"""Limits on templates and tokenizers, derived from the model's context length."""

from __future__ import annotations

import msgspec

_MIN_CHARACTERS = 64 << 10
_CHARACTERS_PER_TOKEN = 32
_MIN_MEMORY_BYTES = 512 << 20
_MEMORY_BYTES_PER_CHARACTER = 256  # tokenizers keeps a text's offsets, words and pieces besides its ids
_RENDERED_PER_CHARACTER = 16  # characters; the placeholder of a control token takes 32
_TOKENS_PER_CHARACTER = 4


class TextLimits(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Limits of one call; its caller has checked the length of the input."""

    timeout_s: float
    max_rendered: int  # characters that a template makes
    max_tokens: int
    memory_bytes: int

    @classmethod
    def of(cls, max_model_len: int, *, timeout_s: float) -> TextLimits:
        """Return a model's limits: output and memory for far more characters than its context holds."""
        max_characters = max_characters_of(max_model_len)
        return cls(
            timeout_s=timeout_s,
            max_rendered=_RENDERED_PER_CHARACTER * max_characters,
            max_tokens=_TOKENS_PER_CHARACTER * max_characters,
            memory_bytes=_MIN_MEMORY_BYTES + _MEMORY_BYTES_PER_CHARACTER * max_characters,
        )


def max_characters_of(max_model_len: int) -> int:
    """Return the number of characters above which no text fits into a model's context."""
    return max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * max_model_len)
