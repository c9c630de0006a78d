"""Control tokens that people write out in a message stay text: they end no turn and begin none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sagellm.engines.text.placeholders import Placeholders
from sagellm.engines.text.tokenizer import is_foreign, tokenizer_error


class ControlTokens:
    """Knows how a tokenizer's control tokens look, and what they are as mere text."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        longest_first = sorted((text for text in texts if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._encode_plain = _plain_encoder(tokenizer) if longest_first else None

    def hide(self, text: str, placeholders: Placeholders) -> str:
        """Put a mark in the place of each control token."""
        encode = self._encode_plain
        if self._pattern is None or encode is None:
            return text
        try:
            return self._pattern.sub(lambda found: placeholders.mark(found[0], encode(found[0])), text)
        except BaseException as error:
            if not is_foreign(error):
                raise
            raise tokenizer_error("the model's tokenizer cannot encode its own tokens", error) from error


def _plain_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return what encodes text without looking for control tokens: a copy, as the switch is its state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python: the switch is an argument
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return lambda text: list(tokenizer(text, **options)["input_ids"])
    plain = type(backend).from_str(backend.to_str())
    plain.encode_special_tokens = True
    return lambda text: list(plain.encode(text, add_special_tokens=False).ids)
