"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.protocols.parsers import AnswerParser, FunctionTool, ToolParserProtocol
from sagellm.engines.parsers.buffered import call_tags, calls_or_text, dumped, tag_start
from sagellm.engines.parsers.hermes import CLOSE, OPEN, HermesParser

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"<function=([^<>\n]{1,128})>")
_KEY = re.compile(r"<parameter=([^<>\n]{1,512})>")
_MAX_NAME = 600


class Qwen3ToolParser(ToolParserProtocol):
    """XML in `<tool_call>` tags, or the JSON of Hermes, which other Qwen3 models write.

    Source: the chat template of Qwen3-Coder.
    """

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Some vocabularies have the tags as special tokens."""
        return (OPEN, CLOSE)

    def fits(self, chat_template: str) -> bool:
        """Say whether the template has the XML."""
        return OPEN in chat_template and _FUNCTION in chat_template

    def start(self, tools: Sequence[FunctionTool] | None) -> AnswerParser:
        """Begin an answer."""
        return Qwen3Parser(tools)

    def structure(
        self, tools: Sequence[FunctionTool], *, is_required: bool, is_parallel: bool
    ) -> Mapping[str, Any]:
        """Return tags whose content is the parameters as XML."""
        begin, end = f"{OPEN}\n{_FUNCTION}{{name}}>\n", f"\n{_END_FUNCTION}\n{CLOSE}"
        tags = call_tags(tools, begin, end, style="qwen_xml", by_schema=is_required)
        return calls_or_text(tags, [OPEN], is_required=is_required, is_parallel=is_parallel)


class Qwen3Parser(HermesParser):
    """One answer. Arguments come parameter by parameter, as the JSON that a schema says the texts are."""

    def __init__(self, tools: Sequence[FunctionTool] | None) -> None:
        super().__init__(tools)
        self._properties: Mapping[str, Any] = {}
        self._num_parameters = 0

    def begin(self) -> bool:
        """Pass over the tag, to JSON or XML."""
        if not super().begin():
            return False
        if self.text.startswith("<") and self.state == self.give_back:
            self.state = self._read_function
        return True

    def _read_function(self) -> bool:
        found = _NAME.match(self.text)
        if found is None:
            begins = _FUNCTION.startswith(self.text[: len(_FUNCTION)])
            if begins and not self.is_over and len(self.text) < _MAX_NAME and "\n" not in self.text:
                return False
        if found is None or not self.knows(found[1]):
            self.state = self.give_back
            return True
        self.take(found.end())
        self._num_parameters = 0
        tool = (self.tools or {}).get(found[1])
        properties = tool.parameters.get("properties") if tool else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self.start_call(found[1])
        self.add_arguments("{")
        self.state = self._read_parameter
        return True

    def _read_parameter(self) -> bool:
        """Read a parameter once it is complete, or the end of the function."""
        place = tag_start(self.text, (_PARAMETER, _END_FUNCTION, CLOSE))
        rest = self.text[place:]
        if rest.startswith((_END_FUNCTION, CLOSE)):
            self.take(place + len(_END_FUNCTION) * rest.startswith(_END_FUNCTION))
            self.add_arguments("}")
            self.state = self.after_call
            return True
        key = _KEY.match(rest)
        if key is None and len(rest) >= _MAX_NAME:  # not a parameter: pass over the tag
            self.take(place + len(_PARAMETER))
            return True
        if key is None:
            if self.is_over:
                self.take(len(self.text))
                self.state = self.read_content
            return self.is_over
        self.take(place + key.end())
        comma = ", " if self._num_parameters else ""
        self.add_arguments(f"{comma}{json.dumps(key[1], ensure_ascii=False)}: ")
        self._num_parameters += 1
        schema = self._properties.get(key[1])
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        self.state = self._begin_text if kind == "string" else self._read_value
        return True

    def _begin_text(self) -> bool:
        """Pass over the line end in front of a text."""
        if not self.text and not self.is_over:
            return False
        self.text = self.text.removeprefix("\n")
        self.add_arguments('"')
        self.state = self._read_text
        return True

    def _read_text(self) -> bool:
        """Report a text as it arrives, without the line end behind it."""
        end = tag_start(self.text, ("\n" + _END_PARAMETER, _END_PARAMETER))
        is_end = self.text.startswith(("\n" + _END_PARAMETER, _END_PARAMETER), end)
        text = self.take(len(self.text) if self.is_over and not is_end else end)
        self.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if is_end:
            self.text = self.text.removeprefix("\n").removeprefix(_END_PARAMETER)
            self.add_arguments('"')
            self.state = self._read_parameter
        return is_end

    def _read_value(self) -> bool:
        """Report a value when it is complete, as JSON; a text that is not JSON is itself."""
        end = self.text.find(_END_PARAMETER)
        if end < 0:
            return False
        text = self.take(end).strip()
        self.take(len(_END_PARAMETER))
        self.add_arguments(dumped(_value(text)))
        self.state = self._read_parameter
        return True


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)
