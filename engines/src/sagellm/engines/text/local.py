"""Runs templates and tokenizers in the caller's process, for engines that run there too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sagellm.engines.text.calls import Call, Decode, Render, TokenCall
from sagellm.engines.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters above which a text is tokenized off the event loop."""


def is_long(call: Call) -> bool:
    """Say whether a call may take long; template variables may ask for any amount of work."""
    return call.num_characters > LONG_TEXT or (isinstance(call, Render) and bool(call.options))


class LocalTextRunner:
    """A TextRunner that runs short calls in place and long ones on a thread.

    Threads cannot be killed, so calls have no deadline; servers use `ProcessTextRunner`.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, max_characters: int | None = None) -> None:
        self._template = ChatTemplate(tokenizer, max_characters=max_characters)

    async def token_ids(self, call: TokenCall) -> list[list[int]]:
        """Return lists of token ids, as the call describes them."""
        return await _run(call, lambda: call.run(self._template))

    async def text(self, call: Decode) -> str:
        """Return a text."""
        return await _run(call, lambda: call.run(self._template))


async def _run(call: Call, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if is_long(call) else work()
