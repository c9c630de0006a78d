"""Prompts as callers write them: a text, token ids, or one of vLLM's mappings of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any, NotRequired, TypedDict

from sagellm.core import InvalidRequestError
from sagellm.engines.config.shown import shown


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, which count, and the text that they were made from, for the output."""

    prompt_token_ids: Seq[int]
    prompt: NotRequired[str | None]


Prompt = str | Seq[int] | TextPrompt | TokensPrompt
"""Text, or token ids, or a mapping with one of these."""

_IDS = "prompt_token_ids"
_TEXT = "the models here read text"
_MISSING = {
    "cache_salt": "give namespace=Namespace(salt=…) beside the prompt",
    "decoder_prompt": "encoder-decoder models are not supported",
    "encoder_prompt": "encoder-decoder models are not supported",
    "mm_processor_kwargs": _TEXT,
    "multi_modal_data": _TEXT,
    "multi_modal_uuids": _TEXT,
    "prompt_embeds": "tensors are not read",
    "token_type_ids": "encoder models are not supported",
}
"""Keys of vLLM's prompts without an equivalent, and why."""


def content_of(prompt: Prompt) -> str | Seq[int]:
    """Return the text or the token ids of a prompt. Raises InvalidRequestError for a mapping without them."""
    if not isinstance(prompt, Mapping):
        return prompt
    for key, value in prompt.items():
        if key not in ("prompt", _IDS) and value is not None:
            why = _MISSING.get(key, f"a prompt has 'prompt' or {_IDS!r}")
            raise InvalidRequestError(f"prompt has the key {shown(key)}: {why}")
    ids: Any = prompt.get(_IDS)
    text = text_of(prompt)
    if ids is None and text is None:
        raise InvalidRequestError(f"prompt is {shown(dict(prompt))}; a mapping has 'prompt' or {_IDS!r}")
    if isinstance(ids, str):
        raise InvalidRequestError(f"{_IDS} is {shown(ids)}; it must be a list of token ids")
    content: str | Seq[int] = text or "" if ids is None else ids
    return content


def text_of(prompt: Prompt) -> str | None:
    """Return the text of a prompt, None if it has none. Raises InvalidRequestError for another type."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if isinstance(text, str):
        return text
    if isinstance(prompt, Mapping) and text is not None:
        raise InvalidRequestError(f"prompt['prompt'] is {shown(text)}; it must be a text")
    return None
