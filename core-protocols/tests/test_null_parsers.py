"""The null parsers keep their contracts by taking all of an answer for content."""

import pytest

from sagellm.core.protocols.parsers import NullReasoningParser, NullToolParser
from sagellm.testing import ReasoningParserContract, ToolParserContract
from sagellm.testing.installed import factory_contract


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


class InTemplate(NullReasoningParser):
    """Reasons in these tags, and has to be given the template."""

    def __init__(self, *, chat_template: str) -> None:
        self.chat_template = chat_template

    def tags(self, prompt_end: str) -> tuple[str, str] | None:
        return "[", "]"


class Kit(ReasoningParserContract):
    def make(self) -> InTemplate:
        return InTemplate(chat_template="")


def test_the_kit_gives_a_parser_the_template_as_the_engine_does():
    factory_contract("reasoning_parser", InTemplate)


def test_tags_are_checked_without_a_sample():
    with pytest.raises(AssertionError, match="Reasoning"):
        Kit().test_tags_surround_reasoning()
