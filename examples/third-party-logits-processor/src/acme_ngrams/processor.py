"""Forbids each token that would complete an n-gram that the output already has."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sagellm.core import (
    ExtraArg,
    LogitsProcessorMetrics,
    LogitsProcessorProtocol,
    LogitsRequest,
    LogitsRow,
)

if TYPE_CHECKING:
    import torch

SIZE = ExtraArg(
    name="no_repeat_ngram_size",
    type="int",
    minimum=1,
    maximum=64,
    summary="length of the token sequences that may be generated only once",
)


class NoRepeatNgrams(LogitsProcessorProtocol[int]):
    """A sequence's state is its n. What the prompt has does not count as generated."""

    def __init__(self, vocab_size: int) -> None:
        self._metrics = LogitsProcessorMetrics()

    def extra_args(self) -> Sequence[ExtraArg]:
        return (SIZE,)

    def start(self, request: LogitsRequest) -> int | None:
        size: int | None = request.extra_args.get(SIZE.name)
        self._metrics.num_sequences += size is not None
        return size

    def apply(self, logits: "torch.Tensor", rows: Sequence[LogitsRow[int]]) -> None:
        self._metrics.num_rows += len(rows)
        for row, size, output_token_ids in rows:
            banned = _completions(list(output_token_ids), size)
            if banned:
                logits[row, banned] = float("-inf")

    def metrics(self) -> LogitsProcessorMetrics:
        return replace(self._metrics)


def _completions(tokens: list[int], size: int) -> list[int]:
    """Return the tokens that have followed the last n - 1 tokens before."""
    tail = tokens[len(tokens) - size + 1 :]
    ends = range(size - 1, len(tokens))
    return [tokens[end] for end in ends if tokens[end - size + 1 : end] == tail]
