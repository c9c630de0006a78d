"""What an engine and its reference are asked: prompts of a file, one a line, or a few varied ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core import ConfigError
from sagellm.engines.config.shown import shown
from sagellm.engines.text.chat_messages import ChatMessage
from sagellm.engines.text.guarded_tokenizer import encode

if TYPE_CHECKING:
    from sagellm.engines import LLMEngine

_SQUARES = "\n".join(f"The square of {number} is {number * number}." for number in range(1, 81))
TEXTS = (
    "The river had been rising for three days, and on the fourth",
    "def fibonacci(n: int) -> int:\n    ",
    '{"name": "Ada", "born": 1815, "languages": [',
    "昔々、あるところに、おじいさんと",
    "人工智能的历史可以追溯到",
    "Ж, ß, ﷽ and 𝄞 are letters and signs; 👩‍👩‍👧‍👦 🇯🇵 🏳️‍🌈 are",
    f"{_SQUARES}\nThe square of 81 is",
)
"""Continued as they stand: prose, code, JSON, Japanese, Chinese, rare characters, and a long one."""
QUESTIONS = ("What is a KV cache?", "Write a haiku about the sea. 🌊", "用一句话解释什么是递归。")
"""Asked through the chat template, of models that have one."""


@dataclass(frozen=True, kw_only=True)
class AskedPrompt:
    """A prompt and the token ids that the engine made of it."""

    text: str
    token_ids: list[int]


def read_texts(path: Path) -> list[str]:
    """Return the lines of a file that are not blank. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the prompts in {path} cannot be read: {reason}") from None
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ConfigError(f"{path} holds no prompt; write one a line")
    return texts


def asked_prompts(
    engine: LLMEngine, texts: Sequence[str] | None, *, is_raw: bool, max_tokens: int
) -> list[AskedPrompt]:
    """Encode the prompts, those of this module if `texts` is None.

    Given ones go through the chat template if there is one, unless `is_raw`. Those of this module are cut so
    that `max_tokens` more fit into the model's context. Raises ConfigError for a model without a tokenizer,
    and for a given prompt that leaves no room for an answer.
    """
    if engine.light_tokenizer is None:
        raise ConfigError("the model has no tokenizer, so it cannot read prompts; --tokenizer names another")
    is_chat = engine.chat_template.exists and not is_raw
    if texts is not None:
        asked = [_asked(engine, text, is_chat=is_chat) for text in texts]
        for number, each in enumerate(asked, 1):
            if len(each.token_ids) >= engine.max_model_len:
                raise ConfigError(
                    f"prompt {number} has {len(each.token_ids):,} tokens; the model's context is "
                    f"{engine.max_model_len:,}, its answer included: {shown(each.text)}"
                )
        return asked
    prompts = [_asked(engine, text, is_chat=False) for text in TEXTS]
    if is_chat:
        prompts += [_asked(engine, text, is_chat=True) for text in QUESTIONS]
    room = max(1, engine.max_model_len - max_tokens)
    return [AskedPrompt(text=each.text, token_ids=each.token_ids[:room]) for each in prompts]


def _asked(engine: LLMEngine, text: str, *, is_chat: bool) -> AskedPrompt:
    if is_chat:
        return AskedPrompt(text=text, token_ids=engine.chat_template.render([ChatMessage("user", text)]))
    assert engine.light_tokenizer is not None, "asked_prompts looks"
    return AskedPrompt(text=text, token_ids=encode(engine.light_tokenizer, text))
