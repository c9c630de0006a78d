"""What is asked of a chat template and a tokenizer, as values that run here or in another process."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sagellm.core import InvalidRequestError
from sagellm.engines.text.bad_words import bad_words_token_ids
from sagellm.engines.text.chat import ChatTemplate
from sagellm.engines.text.messages import ChatMessage
from sagellm.engines.text.tokenizer import decode, encode

_CHARACTERS_A_MESSAGE = 64


class Render(msgspec.Struct, frozen=True, tag=True):
    """The template's tokens for a conversation, as one list; `options` are variables of the template."""

    messages: list[ChatMessage]
    add_generation_prompt: bool
    options: dict[str, Any]

    @property
    def num_characters(self) -> int:
        """How much it has to read."""
        return sum(_CHARACTERS_A_MESSAGE + len(message.content) for message in self.messages)

    def run(self, template: ChatTemplate) -> list[list[int]]:
        """Render the conversation."""
        return [
            template.render(
                self.messages, add_generation_prompt=self.add_generation_prompt, options=self.options
            )
        ]


class Encode(msgspec.Struct, frozen=True, tag=True):
    """The tokens of each text."""

    texts: list[str]
    add_special_tokens: bool

    @property
    def num_characters(self) -> int:
        """How much it has to read."""
        return sum(map(len, self.texts))

    def run(self, template: ChatTemplate) -> list[list[int]]:
        """Tokenize the texts."""
        tokenizer = template.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer; give token ids")
        return [encode(tokenizer, text, add_special_tokens=self.add_special_tokens) for text in self.texts]


class EncodeBadWords(msgspec.Struct, frozen=True, tag=True):
    """The token sequences that spell each of some words."""

    words: list[str]

    @property
    def num_characters(self) -> int:
        """How much it has to read."""
        return sum(map(len, self.words))

    def run(self, template: ChatTemplate) -> list[list[int]]:
        """Tokenize the words, each at the beginning of a text and after a space."""
        if template.tokenizer is None:
            raise InvalidRequestError("bad_words are text and the model has no tokenizer")
        return [list(ids) for ids in bad_words_token_ids(self.words, template.tokenizer)]


class Decode(msgspec.Struct, frozen=True, tag=True):
    """The text of tokens."""

    token_ids: list[int]

    @property
    def num_characters(self) -> int:
        """How much it has to read."""
        return len(self.token_ids)

    def run(self, template: ChatTemplate) -> str:
        """Decode the tokens."""
        return "" if template.tokenizer is None else decode(template.tokenizer, self.token_ids)


TokenCall = Render | Encode | EncodeBadWords
Call = TokenCall | Decode


class TextRunner(Protocol):
    """Runs calls of one model's template and tokenizer; where, and within which limits, is its own affair.

    Both methods raise ForeignTextError for what template or tokenizer cannot do, InvalidRequestError for
    what the caller got wrong, and EngineError if nothing can be run at all.
    """

    async def token_ids(self, call: TokenCall) -> list[list[int]]:
        """Return lists of token ids, as the call describes them."""
        ...

    async def text(self, call: Decode) -> str:
        """Return a text."""
        ...
