"""From prompts and messages to token ids: template and tokenizer, off the event loop when long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sagellm.core import InvalidRequestError, get_logger
from sagellm.engines.input_processor import LONG_TEXT
from sagellm.engines.server.errors import invalid, printable
from sagellm.engines.server.schema import MAX_PROMPTS, ChatBody, CompletionBody, Message, TokenizeBody
from sagellm.engines.text import ChatMessage, ChatTemplate
from sagellm.engines.text.chat import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

logger = get_logger(__name__)

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

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template.exists

    async def encode_completion(self, body: CompletionBody) -> list[EncodedPrompt]:
        """Return the prompts of a completion: one of a text or of ids, many of a list. Raises APIError."""
        prompts = _prompts(body.prompt)
        num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        self._check_length(num_characters, "prompt")
        return await _aside(lambda: [self._encode(prompt) for prompt in prompts], num_characters)

    async def encode_chat(self, body: ChatBody) -> EncodedPrompt:
        """Return the prompt that the model's chat template makes of the messages. Raises APIError."""
        token_ids = await self._rendered(
            body.messages, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt
        )
        return EncodedPrompt(token_ids=self._checked(token_ids, "messages"))

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Return the tokens of a text or of messages, even more than the context holds. Raises APIError."""
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "prompt: give either a prompt or messages")
        if body.messages is not None:
            if body.add_special_tokens:
                raise invalid(
                    "add_special_tokens",
                    "add_special_tokens: for messages, the chat template adds them; leave it out",
                )
            return await self._rendered(
                body.messages, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt
            )
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(body, name):
                raise invalid(name, f"{name}: only for messages; leave it out with a prompt")
        text, is_special = body.prompt or "", body.add_special_tokens is not False
        self._check_length(len(text), "prompt")
        return await _aside(lambda: self._token_ids(text, add_special_tokens=is_special), len(text))

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens, control tokens included. Raises APIError."""
        self._check_tokens(token_ids)
        return await _aside(lambda: self.decode(token_ids), len(token_ids))

    async def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "it made the ids"
        return await _aside(lambda: list(tokenizer.convert_ids_to_tokens(list(token_ids))), len(token_ids))

    def unread(self, options: Mapping[str, Any]) -> list[str]:
        """Return the names of variables that the model's template does not read."""
        return [name for name in options if not self._template.reads(name)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt that came as ids."""
        return "" if self._tokenizer is None else str(self._tokenizer.decode(list(token_ids)))

    def text_of(self, token_id: int) -> str:
        """Return the text of one token."""
        return self.decode([token_id])

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_characters:
            most = self._max_characters
            message = f"{param}: {num_characters} characters; there may be at most {most}; shorten it"
            raise invalid(param, message, code="context_length_exceeded")

    def _encode(self, prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(token_ids=self._checked(self._token_ids(prompt), "prompt"), text=prompt)
        return EncodedPrompt(token_ids=self._checked(prompt, "prompt"))

    def _checked(self, token_ids: Sequence[int], param: str) -> Sequence[int]:
        if not token_ids:
            raise invalid(
                param, f"{param}: it has no tokens, and the model needs at least one; write some text"
            )
        if len(token_ids) >= self._max_model_len:
            raise invalid(
                param,
                f"{param}: {len(token_ids)} tokens; there may be at most {self._max_model_len - 1}, so that "
                f"one of the model's {self._max_model_len} is left to generate; shorten it",
                code="context_length_exceeded",
            )
        return token_ids

    def _check_tokens(self, token_ids: list[int]) -> None:
        if self._tokenizer is None:
            raise invalid("tokens", "tokens: the model has no tokenizer, so its tokens have no text")
        if len(token_ids) > self._max_characters:
            message = (
                f"tokens: {len(token_ids)} tokens; there may be at most {self._max_characters}; send fewer"
            )
            raise invalid("tokens", message, code="context_length_exceeded")
        largest, most = max(token_ids, default=0), len(self._tokenizer) - 1
        if largest > most:
            raise invalid("tokens", f"tokens: {largest} is not in the vocabulary; its tokens are 0 to {most}")

    def _token_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise invalid("prompt", "prompt: the model has no tokenizer; give token ids")
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    async def _rendered(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool | None,
    ) -> list[int]:
        """Apply the model's template. What looks like a control token in a message stays text."""
        read = [ChatMessage(message.role, message.text, message.name) for message in messages]
        num_characters = sum(len(message.content) for message in read)
        self._check_length(num_characters, "messages")
        given = {name: value for name, value in (options or {}).items() if value is not None}
        try:
            self._template.check_options(given)
        except InvalidRequestError as error:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs: {error}") from error
        used = {name: value for name, value in given.items() if self._template.reads(name)}

        def render() -> list[int]:
            try:
                return self._template.render(
                    read, add_generation_prompt=add_generation_prompt is not False, options=used
                )
            except ChatTemplateError as error:
                if str(error) != error.summary:
                    logger.error("%s", printable(str(error)))
                raise invalid("messages", f"messages: {error.summary}") from error
            except InvalidRequestError as error:
                raise invalid("messages", f"messages: {error}") from error

        # Variables may make work.
        return await _aside(render, LONG_TEXT + 1 if used else num_characters + 64 * len(read))


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
