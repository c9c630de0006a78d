"""The conformance kit, and what is particular to this processor."""

from typing import Any

import torch

from acme_ngrams.processor import NoRepeatNgrams
from sagellm.core import LogitsRequest, LogitsRow
from sagellm.testing import LogitsProcessorContract


class TestNoRepeatNgrams(LogitsProcessorContract):
    def make(self, vocab_size: int) -> NoRepeatNgrams:
        return NoRepeatNgrams(vocab_size)

    def requests(self) -> list[LogitsRequest]:
        return [LogitsRequest(extra_args={"no_repeat_ngram_size": size}) for size in (1, 2, 3)]


def banned(size: int, output: list[int]) -> list[Any]:
    logits = torch.zeros(1, 10)
    NoRepeatNgrams(10).apply(logits, [LogitsRow(0, size, output)])
    return logits[0].isinf().nonzero().flatten().tolist()


def test_what_would_complete_an_ngram_again_is_banned() -> None:
    assert banned(2, [1, 2, 3, 1]) == [2]
    assert banned(2, [1, 2, 1, 3, 1]) == [2, 3]
    assert banned(3, [1, 2, 3, 1, 2]) == [3]
    assert banned(1, [4, 5]) == [4, 5]
    assert banned(3, [1]) == banned(2, []) == []


def test_its_argument_has_bounds() -> None:
    (size,) = NoRepeatNgrams(10).extra_args()
    assert [size.accepts(value) for value in (0, 1, 64, 65, "2")] == [False, True, True, False, False]
