"""Renders the embedded model's plain conversations: importing Jinja takes longer than its whole answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_KNOWN = frozenset({"63871ac5483cf1b641132cde778f86fd13a36de58555b8743bbdc348b8966e1a"})
"""SHA-256 of templates that write messages without tools as ChatML."""


def render_plain_chat(
    source: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str | None:
    """Return what a known template makes of messages that are a role and a text; None for all others."""
    if not messages or not _is_known(source) or not all(map(_is_plain, messages)):
        return None
    turns = [f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages]
    return "".join([*turns, "<|im_start|>assistant\n"] if add_generation_prompt else turns)


@lru_cache(maxsize=8)
def _is_known(source: str) -> bool:
    return hashlib.sha256(source.encode("utf-8", "replace")).hexdigest() in _KNOWN


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and all(type(each) is str for each in message.values())
