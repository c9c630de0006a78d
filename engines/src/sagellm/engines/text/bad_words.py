"""The token ids of words that must not be generated."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sagellm.core import InvalidRequestError
from sagellm.engines.text.guarded_tokenizer import encode

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer


def bad_words_token_ids(words: Collection[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return each word as it is tokenized at the beginning of a text and after a space, as vLLM does.

    The form after a space counts only if it begins with a different token and has the same length. Otherwise
    the space is a token of its own, or the form contains the first one. Raises InvalidRequestError for a word
    that has no tokens, TokenizerError.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (
            tuple(encode(tokenizer, space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not bare:
            raise InvalidRequestError(f"bad_words has {word!r}, which has no tokens")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(found)
