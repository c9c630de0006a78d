"""Parses whole answers: for callers that have the text, and for servers at the end of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sagellm.core import (
    InvalidRequestError,
    PluginRegistry,
    ProviderSpec,
    ReasoningParserProtocol,
    ToolParserProtocol,
)
from sagellm.core.protocols.parsers import (
    AnswerParser,
    AnswerPart,
    Content,
    FunctionTool,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True)
class ToolCall:
    """A call that the model wrote. `arguments` is JSON as it wrote it, and need not be valid."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """What an answer consists of."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[AnswerPart]) -> Answer:
        """Join parts, which are in order."""
        answer = cls()
        for part in parts:
            if isinstance(part, Content):
                answer.content += part.text
            elif isinstance(part, Reasoning):
                answer.reasoning += part.text
            elif isinstance(part, ToolCallStart):
                answer.tool_calls.append(ToolCall(part.id, part.name))
            elif isinstance(part, ToolCallArguments):
                answer.tool_calls[part.call_index].arguments += part.text
        return answer


class ReasoningThenCalls(AnswerParser):
    """One parser after the other: calls are looked for in the content that the first one finds."""

    def __init__(self, reasoning: AnswerParser, calls: AnswerParser) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Take the next text and return what became certain."""
        return self._read(self._reasoning.feed(text))

    def finish(self) -> Sequence[AnswerPart]:
        """Return the rest."""
        return [*self._read(self._reasoning.finish()), *self._calls.finish()]

    def _read(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        found: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, Content):
                found += self._calls.feed(part.text)
            else:
                found.append(part)
        return found


def parse_tool_calls(
    text: str,
    *,
    parser: str | Mapping[str, Any] | ProviderSpec,
    tools: Iterable[Mapping[str, Any]] | None = None,
    reasoning_parser: str | Mapping[str, Any] | ProviderSpec | None = None,
    prompt_end: str = "",
) -> Answer:
    """Return the content, the tool calls and the reasoning in the text of an answer.

    `parser` is a tool parser, as a setting names it: `hermes`, `qwen3`, `llama3`, `mistral`, or one of
    another package with its options. With a `reasoning_parser`, calls are looked for behind the reasoning;
    `prompt_end` is the end of the prompt's text, if its template may have begun that. Where a format's tags
    are special tokens, generate the text with `skip_special_tokens=False`. With `tools`, as for
    `LLMEngine.chat`, calls of other functions are content. Raises UnknownProviderError, ConfigError for an
    unknown option, and InvalidRequestError for tools that are not functions.
    """
    registry = PluginRegistry.load()
    calls: ToolParserProtocol = registry.make("tool_parser", ProviderSpec.of(parser), chat_template="")
    reader = calls.start(None if tools is None else list(map(function_tool, tools)))
    if reasoning_parser is not None:
        spec = ProviderSpec.of(reasoning_parser)
        thinking: ReasoningParserProtocol = registry.make("reasoning_parser", spec, chat_template="")
        reader = ReasoningThenCalls(thinking.start(prompt_end), reader)
    return Answer.of([*reader.feed(text), *reader.finish()])


def function_tool(tool: Mapping[str, Any]) -> FunctionTool:
    """Return a function of OpenAI's form, `{"type": "function", "function": {"name": …, …}}`.

    Raises InvalidRequestError.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        told = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
        raise InvalidRequestError(f"a tool is {str(tool)[:100]!r}; it must be {told}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"the parameters of {function['name']!r} must be a JSON schema, an object")
    return FunctionTool(
        name=function["name"],
        parameters=parameters or {},
        is_strict=function.get("strict") is True,
    )
