"""The tokens of a tokenizer as bytes, and how they cross to another process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sagellm.core.protocols.grammar import Vocabulary
from sagellm.engines.text.detokenizer import decoder_of

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer


_NO_TEXT = b"\xff"
"""Not UTF-8, so that no text that must match something has it."""


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Iterable[int]) -> Vocabulary:
    """Return the tokens of a model with `vocab_size` rows of logits: what each adds within a text.

    A token that stands for a part of a character has its bytes, and a special token some that no text has.
    Takes 0.3 s for 150,000 byte-level tokens, a few times as long for others.
    """
    decoder = decoder_of(tokenizer, skip_special_tokens=True)
    before = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    start = decoder.decode(before)
    tokens = [b""] * vocab_size
    for token_id in range(min(len(tokenizer), vocab_size)):
        if decoder.is_silent(token_id):  # only structural tags name it, by its id
            tokens[token_id] = _NO_TEXT + decoder.spelling(token_id).encode()
            continue
        raw = decoder.raw(token_id)
        if raw is None:  # some tokens are another text where they stand first
            raw = decoder.decode([*before, token_id]).removeprefix(start).encode()
        tokens[token_id] = raw
    stops = frozenset(token_id for token_id in stop_token_ids if token_id < vocab_size)
    for token_id in stops:
        tokens[token_id] = b""
    return Vocabulary(tokens=tokens, stop_token_ids=stops)


def to_bytes(vocabulary: Vocabulary) -> bytes:
    """Return a vocabulary as bytes: the numbers of tokens and stop tokens, lengths, stop tokens, texts."""
    stops = sorted(vocabulary.stop_token_ids)
    numbers = [len(vocabulary.tokens), len(stops), *map(len, vocabulary.tokens), *stops]
    return np.array(numbers, np.uint32).tobytes() + b"".join(vocabulary.tokens)


def from_bytes(data: bytes) -> Vocabulary:
    """Return the vocabulary that `to_bytes` wrote."""
    num_tokens, num_stops = np.frombuffer(data, np.uint32, 2).tolist()
    numbers = np.frombuffer(data, np.uint32, num_tokens + num_stops, offset=8).tolist()
    begin, tokens = 8 + 4 * len(numbers), []
    for length in numbers[:num_tokens]:
        tokens.append(data[begin : begin + length])
        begin += length
    return Vocabulary(tokens=tokens, stop_token_ids=frozenset(numbers[num_tokens:]))
