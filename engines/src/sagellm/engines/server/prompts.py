"""From prompts and messages to token ids: template and tokenizer, off the event loop when long."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sagellm.engines.server.errors import APIError, invalid
from sagellm.engines.server.schema import MAX_PROMPTS, ChatBody, CompletionBody

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_LONG_TEXT = 4096  # characters
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
        self._special = sorted(_special_texts(tokenizer), key=len, reverse=True)
        self._plain = _plain_tokenizer(tokenizer) if self._special else None

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

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
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
        """Apply the template. What looks like a control token in a message stays text.

        Such texts are replaced by marks before the template and encoded by themselves after it.
        """
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise invalid("messages", "messages: the model has no chat template; use /v1/completions")
        marks = {text: f"\ue000{secrets.token_hex(8)}\ue001" for text in self._special}
        messages = [_as_template_reads(message, marks) for message in body.messages]
        add_prompt = body.add_generation_prompt is not False
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_prompt
            )
        except Exception as error:  # of the template, which may refuse roles and their order
            raise _template_error(error) from error
        return EncodedPrompt(
            token_ids=self._checked(self._with_plain_texts(str(rendered), marks), "messages")
        )

    def _with_plain_texts(self, rendered: str, marks: dict[str, str]) -> list[int]:
        assert self._tokenizer is not None
        pieces = [(rendered, False)]
        for text, mark in marks.items():
            if mark in rendered:
                pieces = [piece for entry in pieces for piece in _split(*entry, mark, text)]
        token_ids: list[int] = []
        for piece, is_plain in pieces:
            if is_plain and self._plain is not None:
                token_ids += self._plain(piece)
            elif piece:
                token_ids += self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids


def _split(piece: str, is_plain: bool, mark: str, text: str) -> list[tuple[str, bool]]:  # noqa: FBT001
    if is_plain or mark not in piece:
        return [(piece, is_plain)]
    first, *rest = piece.split(mark)
    return [(first, False)] + [entry for part in rest for entry in ((text, True), (part, False))]


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


def _as_template_reads(message: Any, marks: dict[str, str]) -> dict[str, str]:
    content = message.text
    for text, mark in marks.items():
        if text in content:
            content = content.replace(text, mark)
    read = {"role": message.role, "content": content}
    return read if message.name is None else {**read, "name": message.name}


def _template_error(error: Exception) -> APIError:
    """Pass on what a template says with raise_exception, and nothing else."""
    from jinja2 import TemplateError

    said = str(error)[:200] if type(error) is TemplateError else "it fails on these messages"
    return invalid("messages", f"messages: the model's chat template refuses them: {said}")


def _special_texts(tokenizer: PreTrainedTokenizerBase | None) -> set[str]:
    if tokenizer is None:
        return set()
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)


def _plain_tokenizer(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return what encodes text without looking for control tokens: a copy, as the switch is its state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python: the switch is an argument
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return lambda text: list(tokenizer(text, **options)["input_ids"])
    plain = type(backend).from_str(backend.to_str())
    plain.encode_special_tokens = True
    return lambda text: list(plain.encode(text, add_special_tokens=False).ids)


async def _aside(work: Callable[[], T], num_characters: int) -> T:
    """Do short work here and long work on another thread."""
    return await asyncio.to_thread(work) if num_characters > _LONG_TEXT else work()
