"""`{"name": …, "parameters": {…}}` as the whole answer, or after `<|python_tag|>`: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.protocols.parsers import AnswerParser, FunctionTool, ToolParserProtocol
from sagellm.engines.parsers.buffered import JSONCallParser, call_tags, calls_or_text

_TAG = "<|python_tag|>"


class Llama3ToolParser(ToolParserProtocol):
    """JSON objects at the start of an answer, separated by semicolons.

    Source: the chat template of Llama 3.1.
    """

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tag is one."""
        return (_TAG,)

    def fits(self, chat_template: str) -> bool:
        """Say whether the template tells the model to write its parameters so."""
        return "<|start_header_id|>" in chat_template and '"parameters": ' in chat_template

    def start(self, tools: Sequence[FunctionTool] | None) -> AnswerParser:
        """Begin an answer."""
        return Llama3Parser(tools)

    def structure(
        self, tools: Sequence[FunctionTool], *, is_required: bool, is_parallel: bool
    ) -> Mapping[str, Any]:
        """Return objects as the template asks for them."""
        begin = '{"name": "{name}", "parameters": '
        tags = call_tags(tools, begin, "}", by_schema=is_required)
        return calls_or_text(
            tags, ['{"name": '], is_required=is_required, is_parallel=is_parallel, separator="; "
        )


class Llama3Parser(JSONCallParser):
    """One answer."""

    tags = (_TAG,)
    separator = ";"

    def __init__(self, tools: Sequence[FunctionTool] | None) -> None:
        super().__init__(tools)
        self.state = self._read_first

    def _read_first(self) -> bool:
        """Read a call at the start of the answer."""
        body = self.text.lstrip()
        if body and not body.startswith("{"):
            self.state = self.read_content
            return True
        return self.open_call(body)
