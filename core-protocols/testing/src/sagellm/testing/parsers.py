"""What parsers of answers must do. Subclass the contract of the kind and override `make`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar

import pytest

from sagellm.core.protocols.parsers import (
    AnswerParser,
    AnswerPart,
    Content,
    FunctionTool,
    Reasoning,
    ReasoningParserProtocol,
    ToolCallArguments,
    ToolCallStart,
    ToolParserProtocol,
)
from sagellm.testing.cost import least_cpu_ns, slowness

TEXTS = (
    "Hello! How can I help you?",
    "  two spaces, then\na line\n",
    "if a < b: print('<' * 3, \"[x]\", {'a': [1]})",
    "```json\n[1, 2]\n``` is a list, ≥ 0 and \N{GRINNING FACE}",
    "\\",
    "",
)
"""Answers that are content in every format."""

_NO_SAMPLE = "give an answer in its format with --sample FILE, in Python override `sample`"


def read(parser: AnswerParser, *deltas: str) -> list[AnswerPart]:
    """Return what a parser finds in an answer."""
    return [part for delta in deltas for part in parser.feed(delta)] + list(parser.finish())


def joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Return parts with texts that follow each other as one, and ids in order instead of random ones."""
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ToolCallStart):
            found.append(part._replace(id=str(part.call_index)))
        elif last is not None and type(last) is type(part) and part[:-1] == last[:-1]:
            found[-1] = last._replace(text=last[-1] + part.text)
        else:
            found.append(part)
    return found


class _AnswersContract:
    """What parsers of both kinds must do."""

    sample: ClassVar[str] = ""  # an answer in the format
    no_sample = _NO_SAMPLE  # why tests are skipped without one

    def begin(self) -> AnswerParser:
        """Return the parser of one answer."""
        raise NotImplementedError

    def test_answers_share_nothing(self) -> None:
        """Two that arrive in turns are read as if each were alone."""
        one, other = self.begin(), self.begin()
        text = self.sample or TEXTS[0]
        parts: list[AnswerPart] = []
        for character in text:
            parts += one.feed(character)
            other.feed("Hello")
        assert joined([*parts, *one.finish()]) == joined(read(self.begin(), text))

    @pytest.mark.parametrize("text", TEXTS)
    def test_other_text_is_content(self, text: str) -> None:
        """Every character of it, whole or one by one."""
        for deltas in ([text], list(text)):
            assert joined(read(self.begin(), *deltas)) == ([Content(text)] if text else [])

    def test_the_parts_do_not_depend_on_the_cuts(self) -> None:
        """Cut into two anywhere, and into single characters."""
        text = self.sample or TEXTS[2]
        whole = joined(read(self.begin(), text))
        assert joined(read(self.begin(), *text)) == whole
        for place in range(len(text)):
            assert joined(read(self.begin(), text[:place], text[place:])) == whole

    def test_an_answer_may_end_anywhere(self) -> None:
        """What was reported of it is what the whole answer begins with."""
        text = self.sample or TEXTS[2]
        whole = joined(read(self.begin(), text))
        for place in range(len(text)):
            parser = self.begin()
            found = joined(parser.feed(text[:place]))
            parser.finish()
            for part, expected in zip(found, whole, strict=False):
                assert part[:-1] == expected[:-1]
                assert str(expected[-1]).startswith(str(part[-1]))

    def test_a_long_answer_takes_microseconds_per_character(self) -> None:
        """Of content, character by character."""
        text = "a < b, " * 3_000

        def run() -> None:
            read(self.begin(), *text)

        assert least_cpu_ns(run, 3) < 20_000 * len(text) * slowness()


class ToolParserContract(_AnswersContract):
    """The contract of ToolParserProtocol as tests.

    Override `sample` with an answer that calls functions; without one, only what needs none is tested.
    """

    def make(self) -> ToolParserProtocol:
        """Return a fresh parser."""
        raise NotImplementedError

    def begin(self) -> AnswerParser:
        """Return the parser of an answer in which any name is that of a tool."""
        return self.make().start(None)

    def test_it_says_which_templates_it_fits(self) -> None:
        """True or False, and False for a template without tools."""
        assert self.make().fits("{{ messages[0].content }}") is False

    def test_its_special_tokens_are_texts(self) -> None:
        """None of them empty."""
        tokens = self.make().special_tokens
        assert isinstance(tokens, tuple)
        assert all(isinstance(token, str) and token for token in tokens)

    def test_calls_have_ids_and_arguments_that_are_objects(self) -> None:
        """Calls are counted from 0, start before their arguments, and no two ids are equal."""
        if not self.sample:
            pytest.skip(self.no_sample)
        parts = [*read(self.begin(), self.sample), *read(self.begin(), self.sample)]
        starts = [part for part in parts if isinstance(part, ToolCallStart)]
        assert len({part.id for part in starts}) == len(starts) > 0
        assert [part.call_index for part in starts] == 2 * list(range(len(starts) // 2))
        arguments: list[str] = []
        for part in parts:
            if isinstance(part, ToolCallStart):
                assert part.name
                arguments.append("")
            elif isinstance(part, ToolCallArguments):
                assert part.call_index == starts[len(arguments) - 1].call_index
                arguments[-1] += part.text
        assert all(isinstance(json.loads(each), dict) for each in arguments)

    def test_calls_of_other_functions_are_content(self) -> None:
        """With all of their tags."""
        if not self.sample:
            pytest.skip(self.no_sample)
        tools = [FunctionTool(name="not_in_the_sample")]
        for deltas in ([self.sample], list(self.sample)):
            assert joined(read(self.make().start(tools), *deltas)) == [Content(self.sample)]

    @pytest.mark.parametrize("is_required", [True, False])
    @pytest.mark.parametrize("is_parallel", [True, False])
    def test_a_structure_is_a_tag_or_none(self, *, is_required: bool, is_parallel: bool) -> None:
        """A structural tag that JSON can hold, with the name of each tool."""
        tools = [FunctionTool(name=name, parameters={"type": "object"}) for name in ("first", "second")]
        found = self.make().structure(tools, is_required=is_required, is_parallel=is_parallel)
        if found is None:
            if self.sample:
                pytest.skip("the format cannot be constrained, so calls cannot be forced")
            return
        assert found["type"] == "structural_tag"
        text = json.dumps(found)
        assert all(tool.name in text for tool in tools)


class ReasoningParserContract(_AnswersContract):
    """The contract of ReasoningParserProtocol as tests.

    Override `sample` with an answer that begins with reasoning, tags included, and goes on with content.
    """

    def make(self) -> ReasoningParserProtocol:
        """Return a fresh parser."""
        raise NotImplementedError

    def prompt_end(self, *, opens: bool) -> str:
        """Return the end of a prompt that has begun the reasoning, or ended it."""
        tags = self.make().tags("")
        return "" if tags is None else f"Hello{tags[0]}\n" if opens else f"Hello{tags[0]}\n\n{tags[1]}\n\n"

    def begin(self) -> AnswerParser:
        """Return the parser of an answer whose reasoning is not begun by the prompt."""
        return self.make().start(self.prompt_end(opens=False))

    def test_it_says_which_templates_it_fits(self) -> None:
        """True or False, and False for a template without reasoning."""
        assert self.make().fits("{{ messages[0].content }}") is False

    def test_tags_surround_reasoning(self) -> None:
        """What stands between them is reasoning, what follows is content, and neither has a tag."""
        tags = self.make().tags("")
        if tags is None:
            assert not self.sample
            return
        answer = f"{tags[0]}because{tags[1]}so"
        assert joined(read(self.make().start(""), answer)) == [Reasoning("because"), Content("so")]

    def test_a_sample_has_reasoning_and_content(self) -> None:
        """In this order."""
        if not self.sample:
            pytest.skip(self.no_sample)
        found = joined(read(self.make().start(""), self.sample))
        assert [type(part) for part in found] == [Reasoning, Content]

    def test_a_prompt_that_ended_the_reasoning_leaves_content(self) -> None:
        """And its answer has no tags to wait for."""
        if not self.sample:
            pytest.skip(self.no_sample)
        prompt_end = self.prompt_end(opens=False)
        if self.make().tags(prompt_end) is not None:
            pytest.skip("it takes any tags from the answer alone")
        assert joined(read(self.make().start(prompt_end), "so")) == [Content("so")]
