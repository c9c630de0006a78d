"""Log-probabilities in OpenAI's two shapes: of completions and of chats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sagellm.engines.outputs import Logprob

_LOWEST = -9999.0  # JSON has no infinity; vLLM's number
Entry = dict[int, Logprob]


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    num_top: int,
    *,
    offset: int = 0,
    text_of: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """Write the log-probabilities of completions; `offset` is where the first token's text begins.

    The first token of a prompt has none: its entry is None, and `text_of` returns its text.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = _text(token_id, entry, text_of)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(None if entry is None else finite(entry[token_id].logprob))
        tops.append(None if entry is None else _top_texts(token_id, entry, num_top))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> dict[str, Any]:
    """Write the log-probabilities of chats."""
    content = [
        {**_chat_token(entry[token_id]), "top_logprobs": [_chat_token(one) for one in _top(entry, num_top)]}
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, Any] | None]:
    """Write the log-probabilities of a prompt as vLLM does: by token id."""
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in entry.items()
        }
        for entry in entries
    ]


def finite(logprob: float) -> float:
    """Return a number that JSON can represent."""
    return logprob if logprob > _LOWEST else _LOWEST


def _text(token_id: int, entry: Entry | None, text_of: Callable[[int], str] | None) -> str:
    if entry is not None:
        return entry[token_id].decoded_token
    return "" if text_of is None else text_of(token_id)


def _top(entry: Entry, num_top: int) -> Iterable[Logprob]:
    return sorted(entry.values(), key=lambda one: -one.logprob)[:num_top]


def _top_texts(token_id: int, entry: Entry, num_top: int) -> dict[str, float]:
    """Return the most likely tokens and the chosen one."""
    texts: dict[str, float] = {}
    for one in (entry[token_id], *_top(entry, num_top)):
        texts.setdefault(one.decoded_token, finite(one.logprob))  # tokens may have the same text
    return texts


def _chat_token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token
    # A token that is not a whole character decodes to a replacement, whose bytes differ from its own.
    raw = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": finite(one.logprob), "bytes": raw}
