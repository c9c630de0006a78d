"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3 and many others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.protocols.parsers import AnswerParser, FunctionTool, ToolParserProtocol
from sagellm.engines.parsers.buffered import JSONCallParser, call_tags, calls_or_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser(ToolParserProtocol):
    """JSON in `<tool_call>` tags.

    Source: the chat templates of Hermes 2 Pro (NousResearch/Hermes-Function-Calling) and Qwen3.
    """

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Some vocabularies have the tags as special tokens."""
        return (OPEN, CLOSE)

    def fits(self, chat_template: str) -> bool:
        """Say whether the template has the tag, and not the XML of Qwen3-Coder."""
        return OPEN in chat_template and "<function=" not in chat_template

    def start(self, tools: Sequence[FunctionTool] | None) -> AnswerParser:
        """Begin an answer."""
        return HermesParser(tools)

    def structure(
        self, tools: Sequence[FunctionTool], *, is_required: bool, is_parallel: bool
    ) -> Mapping[str, Any]:
        """Return tags whose content is a call as the templates write it."""
        tags = call_tags(
            tools, f'{OPEN}\n{{"name": "{{name}}", "arguments": ', f"}}\n{CLOSE}", by_schema=is_required
        )
        return calls_or_text(tags, [OPEN], is_required=is_required, is_parallel=is_parallel)


class HermesParser(JSONCallParser):
    """One answer. Subclasses may have other tags."""

    open_tag, close_tag = OPEN, CLOSE

    def __init__(self, tools: Sequence[FunctionTool] | None) -> None:
        super().__init__(tools)
        self.tags = (self.open_tag,)

    def after_call(self) -> bool:
        """Pass over the closing tag, which a model may forget."""
        rest = self.text.lstrip()
        if not self.is_over and len(rest) < len(self.close_tag) and self.close_tag.startswith(rest):
            return False
        if rest.startswith(self.close_tag):
            self.text = rest[len(self.close_tag) :]
        self.state = self.read_content
        return True
