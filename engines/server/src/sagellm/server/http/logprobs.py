"""Log-probabilities in OpenAI's two shapes, of completions and of chats, and in vLLM's, of prompts.

Each is JSON in parts, usually one per token, since an answer may have millions of log-probabilities.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from sagellm.engines.logprobs import Position
from sagellm.engines.text.detokenizer import TokenText
from sagellm.server.http.reply import encode_json

_LOWEST = -9999.0  # JSON has no infinity; vLLM's number
_PART_BYTES = 64 << 10
_SPACES = re.compile(r"\s+")

TokenAt = tuple[Position, int]
"""A position, and where its token begins in the text of the answer."""


def with_offsets(positions: Iterable[Position], offset: int = 0) -> Iterator[TokenAt]:
    """Yield positions of an output whose text begins at this offset."""
    for position in positions:
        yield position, offset
        offset += position.texts[0].num_characters


def with_prompt_offsets(positions: Iterable[Position | None], prompt: str) -> Iterator[TokenAt | None]:
    """Yield positions of a prompt, or None as they do.

    Each token is looked for where the one before ends. Special tokens that the tokenizer added are not in the
    text; around those that the caller wrote, the text of tokens may have more spaces, or fewer.
    """
    end = 0
    for position in positions:
        if position is None:
            yield None
        else:
            start, end = _find(position.texts[0], prompt, end)
            yield position, start


def _find(token: TokenText, prompt: str, offset: int) -> tuple[int, int]:
    """Return where a token's text begins in a prompt and where it ends."""
    if prompt.startswith(token.text, offset):
        return offset, offset + len(token.text)
    spaces = _SPACES.match(prompt, offset)
    for start in (offset, spaces.end() if spaces else offset):
        for text in (token.text, token.text.lstrip()):
            if text and prompt.startswith(text, start):
                return start, start + len(text)
    # It is not there: a special token, a space, or a text that the tokenizer has changed.
    num_characters = 0 if token.text.isspace() else token.num_characters
    return offset, min(offset + num_characters, len(prompt))


def completion_logprobs(tokens: Iterable[TokenAt | None], num_top: int, *, as_ids: bool) -> Iterator[bytes]:
    """Yield the log-probabilities of a completion. With `as_ids`, tokens are `token_id:` and a number."""
    texts, values, offsets = bytearray(), bytearray(), bytearray()
    yield b'{"top_logprobs":['
    for each in tokens:
        if each is None:
            yield b""
            continue
        position, offset = each
        separator = b"," if texts else b""
        texts += separator + encode_json(_name(position.token_ids[0], position.texts[0], as_ids=as_ids))
        values += separator + (encode_json(finite(position.values[0])) if position.values else b"null")
        offsets += separator + b"%d" % offset
        yield separator + encode_json(_by_name(position, num_top, as_ids=as_ids))
    for name, column in (b"tokens", texts), (b"token_logprobs", values), (b"text_offset", offsets):
        yield b'],"%b":[' % name
        for start in range(0, len(column), _PART_BYTES):
            yield bytes(column[start : start + _PART_BYTES])
    yield b"]}"


def chat_logprobs(positions: Iterable[Position], num_top: int, *, as_ids: bool) -> Iterator[bytes]:
    """Yield the log-probabilities of a chat. With `as_ids`, tokens are `token_id:` and a number."""
    separator = b""
    yield b'{"content":['
    for position in positions:
        columns = zip(position.token_ids, position.values, position.texts, strict=True)
        token, *others = [_chat_token(*each, as_ids=as_ids) for each in columns]
        yield separator + encode_json({**token, "top_logprobs": others[:num_top]})
        separator = b","
    yield b'],"refusal":null}'


def prompt_logprobs(positions: Iterable[Position | None]) -> Iterator[bytes]:
    """Yield the log-probabilities of a prompt as vLLM has them: by token id."""
    separator = b"["
    for position in positions:
        if position is None:
            yield b""
            continue
        yield separator + encode_json(_by_id(position))
        separator = b","
    yield b"]"


def finite(logprob: float) -> float:
    """Return a number that JSON can represent."""
    return logprob if logprob > _LOWEST else _LOWEST


def _name(token_id: int, text: TokenText, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text.text


def _by_name(position: Position, num_top: int, *, as_ids: bool) -> dict[str, float] | None:
    """Return the token itself and the most likely ones; where two have one text, the second has its id."""
    if not position.values:
        return None
    named: dict[str, float] = {}
    columns = zip(position.token_ids, position.values, position.texts, strict=True)
    for index, (token_id, value, text) in enumerate(columns):
        if index > num_top:
            break
        if index and token_id == position.token_ids[0]:
            continue
        name = _name(token_id, text, as_ids=as_ids)
        named[f"token_id:{token_id}" if name in named else name] = finite(value)
    return named


def _by_id(position: Position) -> dict[str, Any] | None:
    if not position.values:
        return None
    return {
        str(token_id): {
            "logprob": finite(one.logprob),
            "rank": one.rank,
            "decoded_token": one.decoded_token,
        }
        for token_id, one in position.by_id().items()
    }


def _chat_token(token_id: int, value: float, text: TokenText, *, as_ids: bool) -> dict[str, Any]:
    return {
        "token": _name(token_id, text, as_ids=as_ids),
        "logprob": finite(value),
        "bytes": list(text.raw),
    }
