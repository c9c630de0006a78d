"""Calls of a chat template or tokenizer, as values that can run in this process or another."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sagellm.core import InvalidRequestError
from sagellm.engines.text.bad_words import bad_words_token_ids
from sagellm.engines.text.chat_messages import ChatMessage
from sagellm.engines.text.chat_template import ChatTemplate
from sagellm.engines.text.guarded_tokenizer import decode, encode

_CHARACTERS_PER_MESSAGE = 64  # overhead of rendering one


class Render(msgspec.Struct, frozen=True, tag=True):
    """Returns the tokens of a conversation, as one list; `options` are variables of the template."""

    messages: list[ChatMessage]
    add_generation_prompt: bool
    options: dict[str, Any]
    tools: list[dict[str, Any]] = []

    @property
    def num_characters(self) -> int:
        """Approximate size of the input."""
        num_tools = len(msgspec.json.encode(self.tools)) if self.tools else 0
        return num_tools + sum(_CHARACTERS_PER_MESSAGE + each.num_characters for each in self.messages)

    def run(self, template: ChatTemplate) -> list[list[int]]:
        """Render the conversation."""
        return [
            template.render(
                self.messages,
                add_generation_prompt=self.add_generation_prompt,
                options=self.options,
                tools=self.tools,
            )
        ]


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Returns the tokens of each text."""

    texts: list[str]
    add_special_tokens: bool

    @property
    def num_characters(self) -> int:
        """Approximate size of the input."""
        return sum(map(len, self.texts))

    def run(self, template: ChatTemplate) -> list[list[int]]:
        """Tokenize the texts."""
        tokenizer = template.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer; give token ids")
        return [encode(tokenizer, text, add_special_tokens=self.add_special_tokens) for text in self.texts]


class EncodeBadWords(msgspec.Struct, frozen=True, tag=True):
    """Returns the token sequences that spell each word."""

    words: list[str]

    @property
    def num_characters(self) -> int:
        """Approximate size of the input."""
        return sum(map(len, self.words))

    def run(self, template: ChatTemplate) -> list[list[int]]:
        """Tokenize each word, at the start of a text and after a space."""
        if template.tokenizer is None:
            raise InvalidRequestError("bad_words are text and the model has no tokenizer")
        return [list(ids) for ids in bad_words_token_ids(self.words, template.tokenizer)]


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Returns the text of tokens."""

    token_ids: list[int]

    @property
    def num_characters(self) -> int:
        """Approximate size of the input."""
        return len(self.token_ids)

    def run(self, template: ChatTemplate) -> str:
        """Decode the tokens."""
        return "" if template.tokenizer is None else decode(template.tokenizer, self.token_ids)


TokenCall = Render | Encode | EncodeBadWords
Call = TokenCall | Decode


class TextRunner(Protocol):
    """Runs calls of one model's template and tokenizer, in a process and within limits of its choice.

    Both methods raise ForeignTextError if template or tokenizer fail or exceed a limit, InvalidRequestError
    for invalid input, and EngineError if no call can be run.
    """

    async def token_ids(self, call: TokenCall) -> list[list[int]]:
        """Return lists of token ids, as the call describes them."""
        ...

    async def text(self, call: Decode) -> str:
        """Return a text."""
        ...
