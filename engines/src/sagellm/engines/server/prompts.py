"""From prompts and messages to token ids: template and tokenizer, off the event loop when long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sagellm.core import InvalidRequestError
from sagellm.engines.input_processor import LONG_TEXT
from sagellm.engines.server.errors import invalid
from sagellm.engines.server.schema import MAX_PROMPTS, ChatBody, CompletionBody
from sagellm.engines.text import ChatMessage, ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_MIN_TEXT_LIMIT = 64 << 10
_CHARACTERS_A_TOKEN = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """The tokens of a prompt, and its text where the caller gave one."""

    token_ids: Sequence[int]
    text: str | None = None


class PromptEncoder:
    """Encodes what bodies bring. Texts that no model of this length could take are not looked at."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max(_MIN_TEXT_LIMIT, _CHARACTERS_A_TOKEN * max_model_len)
        self._max_model_len = max_model_len
        self._template = ChatTemplate(tokenizer)

    async def encode_completion(self, body: CompletionBody) -> list[EncodedPrompt]:
        """Return the prompts of a completion: one of a text or of ids, many of a list. Raises APIError."""
        prompts = _prompts(body.prompt)
        num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        self._check_length(num_characters, "prompt")
        return await _aside(lambda: [self._encode(prompt) for prompt in prompts], num_characters)

    async def encode_chat(self, body: ChatBody) -> EncodedPrompt:
        """Return the prompt that the model's chat template makes of the messages. Raises APIError."""
        num_characters = sum(len(message.text) for message in body.messages)
        self._check_length(num_characters, "messages")
        return await _aside(lambda: self._render(body), num_characters + 64 * len(body.messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt that came as ids."""
        return "" if self._tokenizer is None else str(self._tokenizer.decode(list(token_ids)))

    def text_of(self, token_id: int) -> str:
        """Return the text of one token."""
        return self.decode([token_id])

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_characters:
            message = f"{param}: {num_characters} characters; there may be at most {self._max_characters}"
            raise invalid(param, message, code="context_length_exceeded")

    def _encode(self, prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(token_ids=self._checked(self._token_ids(prompt), "prompt"), text=prompt)
        return EncodedPrompt(token_ids=self._checked(prompt, "prompt"))

    def _checked(self, token_ids: Sequence[int], param: str) -> Sequence[int]:
        if not token_ids:
            raise invalid(param, f"{param}: there is no token in it")
        if len(token_ids) >= self._max_model_len:
            raise invalid(
                param,
                f"{param}: {len(token_ids)} tokens are too many; the model takes {self._max_model_len - 1} "
                f"and one to generate",
                code="context_length_exceeded",
            )
        return token_ids

    def _token_ids(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise invalid("prompt", "prompt: the model has no tokenizer; give token ids")
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def _render(self, body: ChatBody) -> EncodedPrompt:
        """Apply the model's template. What looks like a control token in a message stays text."""
        messages = [ChatMessage(message.role, message.text, message.name) for message in body.messages]
        try:
            token_ids = self._template.render(
                messages, add_generation_prompt=body.add_generation_prompt is not False
            )
        except InvalidRequestError as error:
            raise invalid("messages", f"messages: {error}") from error
        return EncodedPrompt(token_ids=self._checked(token_ids, "messages"))


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(entry) for entry in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) != 1:
        raise invalid("prompt", "prompt: expected a text, texts, token ids, or lists of token ids")
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt: {len(prompt)} prompts; there may be at most {MAX_PROMPTS}")
    return prompt


async def _aside(work: Callable[[], T], num_characters: int) -> T:
    """Do short work here and long work on another thread."""
    return await asyncio.to_thread(work) if num_characters > LONG_TEXT else work()
