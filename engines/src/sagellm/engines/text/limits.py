"""How much templates and tokenizers may take, by what the model could read at all."""

from __future__ import annotations

import msgspec

_MIN_CHARACTERS = 64 << 10
_CHARACTERS_A_TOKEN = 32
_MIN_MEMORY_BYTES = 512 << 20
_MEMORY_A_CHARACTER = 256  # tokenizers keeps offsets, words and pieces of a text beside its ids

_MAX_RENDERED = 16  # characters from each one that is given; a control token's place in a text takes 32
_MAX_TOKENS = 4  # from each character that is given


class Limits(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What one call may take; its caller has looked at the length of what it is given."""

    timeout_s: float
    max_rendered: int  # characters that a template makes
    max_tokens: int
    memory_bytes: int

    @classmethod
    def of(cls, max_model_len: int, *, timeout_s: float) -> Limits:
        """Return limits for a model: far more characters than its context holds, and memory for them."""
        max_characters = max_characters_of(max_model_len)
        return cls(
            timeout_s=timeout_s,
            max_rendered=_MAX_RENDERED * max_characters,
            max_tokens=_MAX_TOKENS * max_characters,
            memory_bytes=_MIN_MEMORY_BYTES + _MEMORY_A_CHARACTER * max_characters,
        )


def max_characters_of(max_model_len: int) -> int:
    """Return the characters beyond which no text would fit into a model's context."""
    return max(_MIN_CHARACTERS, _CHARACTERS_A_TOKEN * max_model_len)
