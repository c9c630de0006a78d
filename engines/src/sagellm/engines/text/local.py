"""Templates and tokenizers in the caller's own process, for engines that are in that process too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sagellm.engines.text.calls import Call, Decode, Render, TokenCall
from sagellm.engines.text.chat import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters from which on a text is worth tokenizing apart from the rest."""


def is_long(call: Call) -> bool:
    """Say whether a call may take a while; variables of a template may make work."""
    return call.num_characters > LONG_TEXT or (isinstance(call, Render) and bool(call.options))


class LocalText:
    """A TextRunner that does short work in place and long work on a thread.

    No thread can be ended, so nothing here has a deadline: a server that outlives its requests uses
    `TextProcess`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, max_characters: int | None = None
    ) -> None:
        self._template = ChatTemplate(tokenizer, max_characters=max_characters)

    async def token_ids(self, call: TokenCall) -> list[list[int]]:
        """Return lists of token ids, as the call describes them."""
        return await _run(call, lambda: call.run(self._template))

    async def text(self, call: Decode) -> str:
        """Return a text."""
        return await _run(call, lambda: call.run(self._template))


async def _run(call: Call, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if is_long(call) else work()
