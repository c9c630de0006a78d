"""A model whose next token follows from all KV that it reads, so that one wrong block changes the output."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from sagellm.core import ForwardBackendProtocol, ForwardMetrics, InputBatch, KVGroup, KVLayout

VOCAB, BLOCK_SIZE = 64, 4
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"
"""The text of each token."""

LAYOUT = KVLayout(
    group=KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=4, dtype="float32"), block_size=BLOCK_SIZE
)
_WEIGHTS = np.array([1, 2, 4, 8], np.uint64)  # of the 64-bit words of a token's KV, all of which are equal
_MASK = (1 << 64) - 1


def mixed(before: int, token: int) -> int:
    """Return the KV of a token: a hash of it and of the KV before it (splitmix64; Steele et al., 2014)."""
    value = (before + (token + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def chosen(total: int) -> int:
    """Return the token that follows from the sum of all KV; each of its bits matters."""
    return ((total * 0x9E3779B97F4A7C15) & _MASK) >> 58


def state_of(prompt: Sequence[int]) -> int:
    """Return the KV of a prompt's last token, which no other prompt has."""
    last = 0
    for token in prompt:
        last = mixed(last, token)
    return last


@lru_cache(4096)
def expected_tokens(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Return the only right output for a prompt."""
    last = total = 0
    for token in prompt:
        last = mixed(last, token)
        total += last
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(chosen(int(_WEIGHTS.sum()) * total))
        last = mixed(last, tokens[-1])
        total += last
    return tuple(tokens)


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens."""
    return "".join(LETTERS[token] for token in tokens)


class OracleBackend(ForwardBackendProtocol):
    """The forward pass of that model. `take_time` is told how many tokens each step computed.

    `die` is called when what follows a prompt is computed whose last token has its KV in `deadly`.
    """

    def __init__(
        self,
        take_time: Callable[[int], None],
        *,
        deadly: Container[int] = (),
        die: Callable[[], None] = lambda: None,
    ) -> None:
        self._take_time = take_time
        self._deadly, self._die = deadly, die

    def initialize_kv_caches(self, layouts: Sequence[KVLayout], num_blocks: Sequence[int]) -> None:
        """Allocate the KV."""
        self._kv = np.zeros((num_blocks[0] * BLOCK_SIZE, len(_WEIGHTS)), np.uint64)
        self._bytes = self._kv.data.cast("B")

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, one pair after the other."""
        for source, target in pairs:
            self._block(target)[:] = self._block(source)

    def read_blocks(
        self, block_ids: Sequence[int], into: Sequence[memoryview], *, num_in_flight: int = 0
    ) -> None:
        """Copy KV to host memory."""
        for block_id, buffer in zip(block_ids, into, strict=True):
            buffer[:] = self._block(block_id)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        """Copy KV from host memory."""
        for block_id, buffer in zip(block_ids, data, strict=True):
            self._block(block_id)[:] = buffer

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Write the KV of the new tokens, and score the token that follows from all KV up to each."""
        tokens, slots = batch.input_ids.tolist(), batch.slot_mapping.tolist()
        wanted = {flat: row for row, flat in enumerate(batch.logits_indices.tolist())}
        logits = torch.zeros(len(wanted), VOCAB)
        tables = batch.block_tables.numpy()
        flat = 0
        for table, num_new, num_tokens in zip(tables, batch.query_lens, batch.seq_lens, strict=True):
            places = np.arange(num_tokens - num_new)
            before = self._kv[table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE]
            total = int((before @ _WEIGHTS).sum(dtype=np.uint64))
            last = int(before[-1, 0]) if len(before) else 0
            for _ in range(num_new):
                last = mixed(last, tokens[flat])
                self._kv[slots[flat]] = last
                total += int(_WEIGHTS.sum()) * last
                if flat in wanted:
                    logits[wanted[flat], chosen(total)] = 100.0
                    if last in self._deadly:
                        self._die()
                flat += 1
        self._take_time(len(tokens))
        return logits

    def metrics(self) -> ForwardMetrics:
        """Return nothing."""
        return ForwardMetrics()

    def _block(self, block_id: int) -> memoryview:
        size = LAYOUT.block_bytes
        return self._bytes[block_id * size : (block_id + 1) * size]


class LetterTokenizer:
    """A letter for each token of the oracle."""

    def __init__(self) -> None:
        self.chat_template: Any = None
        self.all_special_tokens: list[str] = []
        self.all_special_ids: list[int] = []
        self.added_tokens_decoder: Mapping[int, Any] = {}

    def __len__(self) -> int:
        return VOCAB

    def __call__(self, text: str, **_: Any) -> Mapping[str, Any]:
        """Encode a text."""
        return {"input_ids": [LETTERS.index(letter) for letter in text]}

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Return the text of tokens."""
        return text_of(token_ids)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the letters, or the one."""
        return LETTERS[ids] if isinstance(ids, int) else [LETTERS[each] for each in ids]

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        """Join what was said."""
        return "".join(message["content"] for message in conversation)

    def get_vocab(self) -> Mapping[str, int]:
        """Return all letters."""
        return {letter: index for index, letter in enumerate(LETTERS)}
