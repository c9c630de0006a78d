"""The null logits processor keeps the contract by leaving every row alone."""

import math

import pytest

from sagellm.core import ExtraArg, LogitsRequest
from sagellm.core.protocols.logits_processor import NullLogitsProcessor
from sagellm.testing import LogitsProcessorContract


class TestNullLogitsProcessor(LogitsProcessorContract):
    def make(self, vocab_size: int) -> NullLogitsProcessor:
        return NullLogitsProcessor(vocab_size)


def test_whatever_is_asked_for_it_has_no_state():
    asked = LogitsRequest(logit_bias={1: 1.0}, min_tokens=3, stop_token_ids=frozenset({2}))
    assert NullLogitsProcessor().start(asked) is None


def test_it_reads_nothing_of_what_a_request_brings():
    assert NullLogitsProcessor().extra_args() == ()


SIZE = ExtraArg(name="size", type="int", minimum=2, maximum=64)
IDS = ExtraArg(name="ids", type="int", is_list=True, minimum=0)


@pytest.mark.parametrize(
    ("arg", "accepted", "refused"),
    [
        (SIZE, [2, 64], [1, 65, 2.0, True, "2", None, [2]]),
        (IDS, [[], [0, 7], (3,)], [0, [-1], [1, "a"], [True], "12", None]),
        (
            ExtraArg(name="share", type="float", maximum=1),
            [1, 0.5, -3],
            [1.1, math.nan, -math.inf, False, "1"],
        ),
        (ExtraArg(name="strict", type="bool"), [True, False], [0, 1, "true", None]),
        (ExtraArg(name="style", type="str"), ["", "a"], [1, None, b"a", ["a"]]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_argument_accepts_its_type_within_its_bounds(arg, accepted, refused):
    assert [arg.accepts(value) for value in accepted] == [True] * len(accepted)
    assert [arg.accepts(value) for value in refused] == [False] * len(refused)


def test_an_argument_says_what_is_possible():
    assert SIZE.possible == "a whole number of at least 2 and at most 64"
    assert IDS.possible == "a list, each a whole number of at least 0"
    assert ExtraArg(name="share", type="float", maximum=1).possible == "a finite number of at most 1"
