"""The null logits processor keeps the contract by leaving every row alone."""

from sagellm.core import LogitsRequest, NullLogitsProcessor
from sagellm.core.testing import LogitsProcessorContract


class TestNullLogitsProcessor(LogitsProcessorContract):
    def make(self, vocab_size: int) -> NullLogitsProcessor:
        return NullLogitsProcessor(vocab_size)


def test_whatever_is_asked_for_it_has_no_state():
    asked = LogitsRequest(logit_bias={1: 1.0}, min_tokens=3, stop_token_ids=frozenset({2}))
    assert NullLogitsProcessor().start(asked) is None
