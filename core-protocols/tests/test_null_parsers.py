"""The null parsers keep their contracts by taking all of an answer for content."""

from sagellm.core.protocols.parsers import NullReasoningParser, NullToolParser
from sagellm.testing import ReasoningParserContract, ToolParserContract


class TestNullToolParser(ToolParserContract):
    def make(self) -> NullToolParser:
        return NullToolParser()


class TestNullReasoningParser(ReasoningParserContract):
    def make(self) -> NullReasoningParser:
        return NullReasoningParser()


def test_calls_and_reasoning_stay_in_the_content():
    text = '<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for answer in (NullToolParser().start(None), NullReasoningParser().start("<think>")):
        assert [part.text for part in (*answer.feed(text), *answer.finish())] == [text]


def test_nothing_can_be_forced():
    assert NullToolParser().structure([], is_required=True, is_parallel=True) is None
