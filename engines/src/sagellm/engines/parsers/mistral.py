"""`[TOOL_CALLS][{"name": …, "arguments": {…}}]` and `[TOOL_CALLS]name{…}`: Mistral's models."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.protocols.parsers import AnswerParser, FunctionTool, ToolParserProtocol
from sagellm.engines.parsers.buffered import JSONCallParser, JSONEnd, call_tags, calls_or_text

_TAG, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?\s{0,64}(?=\{)")
_MAY_BE_NAMED = re.compile(r"[A-Za-z0-9_.\[\]-]{1,256}\s{0,64}")
_LETTERS = string.ascii_letters + string.digits


class MistralToolParser(ToolParserProtocol):
    """A list of calls (tokenizers up to v7), or a name and its arguments (from v11 on).

    Source: mistral-common's instruct tokenizers and the models' chat templates.
    """

    def __init__(self, chat_template: str = "") -> None:
        self._has_list = _ARGS not in chat_template

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """All of the tags are."""
        return (_TAG, _ARGS, _CALL_ID)

    def fits(self, chat_template: str) -> bool:
        """Say whether the template has the tag."""
        return _TAG in chat_template

    def start(self, tools: Sequence[FunctionTool] | None) -> AnswerParser:
        """Begin an answer."""
        return MistralParser(tools)

    def structure(
        self, tools: Sequence[FunctionTool], *, is_required: bool, is_parallel: bool
    ) -> Mapping[str, Any]:
        """Return a list of calls, or calls by name where the template has `[ARGS]`."""
        if not self._has_list:
            tags = call_tags(tools, f"{_TAG}{{name}}{_ARGS}", "", by_schema=is_required)
            return calls_or_text(tags, [_TAG], is_required=is_required, is_parallel=is_parallel, separator="")
        items = call_tags(tools, '{"name": "{name}", "arguments": ', "}", by_schema=is_required)
        listed = calls_or_text(items, (), is_required=True, is_parallel=is_parallel, separator=", ")["format"]
        whole = {"type": "tag", "begin": f"{_TAG}[", "content": listed, "end": "]"}
        return calls_or_text([whole], [_TAG], is_required=is_required, is_parallel=False)


class MistralParser(JSONCallParser):
    """One answer. Ids have nine letters or digits, as the templates demand of those that come back."""

    tags = (_TAG,)
    separator, list_end = ",", "]"

    def new_id(self) -> str:
        """Return an id for a call."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def begin(self) -> bool:
        """Pass over the tag, to a list or a name."""
        body = self.text[len(_TAG) :].lstrip()
        if body.startswith("["):
            return self.open_call(body[1:].lstrip())
        is_open = self.open_call(body)
        if body:
            self.state = self._read_name
        return is_open

    def _read_name(self) -> bool:
        found = _NAMED.match(self.text)
        if found is None and not self.is_over and _MAY_BE_NAMED.fullmatch(self.text):
            return False
        if found is None or not self.knows(found[1]):
            self.state = self.give_back
            return True
        self.start_call(found[1])
        self.take(found.end())
        return self.pass_arguments(JSONEnd(), self.read_content)
