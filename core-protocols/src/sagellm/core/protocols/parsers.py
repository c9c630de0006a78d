"""What stands in the text of an answer: reasoning, tool calls, and the content between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """What the model thinks before it answers, without the tags around it."""

    text: str


class ToolCallStart(NamedTuple):
    """A call begins. `call_index` counts those of an answer from 0; no other call has its `id`."""

    call_index: int
    id: str
    name: str


class ToolCallArguments(NamedTuple):
    """The next part of the JSON object that a call has as arguments."""

    call_index: int
    text: str


AnswerPart = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False  # constrain its arguments even where no call is required


class AnswerParser(ABC):
    """Reads one answer as it is generated; holds all that is known of it.

    The parts do not depend on how the text was cut into deltas: joined, they are those of the whole text.
    Text that may be the beginning of a tag is held back until that is decided, so no part of a tag is ever
    content. Both methods take time linear in the text and raise for no text whatever.
    """

    @abstractmethod
    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Take the next text and return what became certain."""

    @abstractmethod
    def finish(self) -> Sequence[AnswerPart]:
        """Return the rest; no more text will come. Called once."""


class ToolParserProtocol(ABC):
    """Finds tool calls in the answers of models that write them in one format.

    Providers are called as `factory(chat_template=...)`, once a server, with the template that lists tools.
    With `auto`, the server takes the first one by name whose `fits` says yes to it. `start` is called for
    each answer of a request with tools, in microseconds; `structure` once for such a request.

    A call is reported when its name is that of one of the tools and its arguments have begun. It cannot be
    taken back then: if the model breaks the format later, the arguments are what it wrote. Whatever is
    not a call is content, tags included. A call's start comes before its arguments, and both before the next
    call; whitespace between calls is nothing.
    """

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tags that a tokenizer may have as special tokens, which answers would not show."""
        return ()

    @abstractmethod
    def fits(self, chat_template: str) -> bool:
        """Say whether a chat template teaches this format."""

    @abstractmethod
    def start(self, tools: Sequence[FunctionTool] | None) -> AnswerParser:
        """Begin an answer to a request with these tools; None if any name is to be taken for a tool's."""

    def structure(
        self, tools: Sequence[FunctionTool], *, is_required: bool, is_parallel: bool
    ) -> Mapping[str, Any] | None:
        """Return what answers must match, as a structural tag; None if the format cannot be constrained.

        With `is_required`, an answer is one call or, with `is_parallel`, one or more, with arguments by the
        schemas. Without, it is any text in which calls that begin are complete, with arguments by the schemas
        of strict tools, and any JSON objects for others. The form is that of xgrammar's structural tags.
        """
        return None


class ReasoningParserProtocol(ABC):
    """Finds the reasoning at the start of answers.

    Providers are called as `factory(chat_template=...)`, once a server, with the template that lists tools.
    With `auto`, the server takes the first one by name whose `fits` says yes to it. `start` is called for
    each answer.
    """

    @abstractmethod
    def fits(self, chat_template: str) -> bool:
        """Say whether a chat template belongs to a model that reasons in this format."""

    @abstractmethod
    def start(self, prompt_end: str) -> AnswerParser:
        """Begin an answer. `prompt_end` is the end of the prompt, which may have opened the reasoning."""

    @abstractmethod
    def tags(self, prompt_end: str) -> tuple[str, str] | None:
        """Return what begins an answer's reasoning, "" if the prompt has, and what ends it.

        None if the prompt has ended it. Answers that must be calls have them after the second tag.
        """


class NullAnswerParser(AnswerParser):
    """All is content."""

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Return the text as content."""
        return [Content(text)] if text else []

    def finish(self) -> Sequence[AnswerPart]:
        """Return nothing."""
        return []


class NullToolParser(ToolParserProtocol):
    """Finds no calls."""

    def fits(self, chat_template: str) -> bool:
        """Say that none does."""
        return False

    def start(self, tools: Sequence[FunctionTool] | None) -> AnswerParser:
        """Return a parser of content."""
        return NullAnswerParser()


class NullReasoningParser(ReasoningParserProtocol):
    """Finds no reasoning: it stays in the content."""

    def fits(self, chat_template: str) -> bool:
        """Say that none does."""
        return False

    def start(self, prompt_end: str) -> AnswerParser:
        """Return a parser of content."""
        return NullAnswerParser()

    def tags(self, prompt_end: str) -> None:
        """Return None."""
