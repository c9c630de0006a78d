"""Keeps control tokens that people spell out in a message as text: they neither end nor begin a turn."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from sagellm.engines.text.guarded_tokenizer import is_foreign, tokenizer_error
from sagellm.engines.text.placeholders import Placeholders


class ControlTokens:
    """Knows how a tokenizer spells its control tokens, and their token ids as plain text."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        longest_first = sorted((text for text in texts if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Build what is needed when a text has a control token; it takes as long as opening the tokenizer."""
        if self._pattern is not None:
            self._encode_plain  # noqa: B018

    @cached_property
    def _encode_plain(self) -> Callable[[str], list[int]]:
        return _plain_encoder(self._tokenizer)

    def hide(self, text: str, placeholders: Placeholders) -> str:
        """Replace each control token by a mark."""
        if self._pattern is None or self._pattern.search(text) is None:
            return text
        try:
            encode = self._encode_plain
            return self._pattern.sub(lambda found: placeholders.mark(found[0], encode(found[0])), text)
        except BaseException as error:
            if not is_foreign(error):
                raise
            raise tokenizer_error("the model's tokenizer cannot encode its own tokens", error) from error


def _plain_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return an encoder that ignores control tokens: of a copy, because the switch is tokenizer state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python, where the switch is an argument
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return lambda text: list(tokenizer(text, **options)["input_ids"])
    plain = type(backend).from_str(backend.to_str())
    plain.encode_special_tokens = True
    return lambda text: list(plain.encode(text, add_special_tokens=False).ids)
