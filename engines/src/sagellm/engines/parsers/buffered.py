"""What the parsers of answers share: a text that arrives in pieces, and the states that read it."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sagellm.core.protocols.parsers import (
    AnswerParser,
    AnswerPart,
    Content,
    FunctionTool,
    ToolCallArguments,
    ToolCallStart,
)

_OUTSIDE = re.compile(r'["{}\[\]<]')  # no JSON has `<` outside strings
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_INSIDE = re.compile(r'["\\]')
_MAX_UNDECIDED = 32_768
"""Characters of an object whose name comes late, above which it is content."""
_MAX_REREAD = 131_072
"""Characters of what is not a call in which calls are looked for; beyond them, all of it is content."""
_MAX_SPACE = 8
"""Characters of whitespace between two parts of constrained arguments: a weak model might never stop."""
_STEPS = {"{": 1, "[": 1, "}": -1, "]": -1}


class BufferedParser(AnswerParser, ABC):
    """Runs states, methods that take text from the front of `text` and say whether they got further.

    A state that returns False waits for more text; at the end of the answer (`is_over`) there is none, and
    the state then takes all there is.
    """

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self.state: Callable[[], bool]  # set by the subclass
        self._parts: list[AnswerPart] = []

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Take the next text and return what became certain."""
        self.text += text
        return self._run()

    def finish(self) -> Sequence[AnswerPart]:
        """Return the rest."""
        self.is_over = True
        return self._run()

    def _run(self) -> Sequence[AnswerPart]:
        while self.state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def take(self, size: int) -> str:
        """Remove text from the front and return it."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def add(self, part: AnswerPart) -> None:
        """Report a part; texts that follow each other become one."""
        last = self._parts[-1] if self._parts else None
        if isinstance(part, ToolCallStart):
            self._parts.append(part)
        elif not part.text:
            return
        elif isinstance(part, ToolCallArguments):
            if isinstance(last, ToolCallArguments) and last.call_index == part.call_index:
                self._parts[-1] = last._replace(text=last.text + part.text)
            else:
                self._parts.append(part)
        elif type(last) is type(part):
            self._parts[-1] = type(part)(last.text + part.text)
        else:
            self._parts.append(part)


def tag_start(text: str, tags: Sequence[str]) -> int:
    """Return where a tag begins, or what may become one at the end; the length of the text if none does."""
    found = [place for tag in tags if (place := text.find(tag)) >= 0]
    if found:
        return min(found)
    longest = max(map(len, tags))
    for place in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[place:]) for tag in tags):
            return place
    return len(text)


def dumped(value: Any) -> str:
    """Return a value as JSON that UTF-8 can encode: with half a surrogate pair, all in ASCII."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _HALF_PAIR.search(text) is None else json.dumps(value)


class JSONEnd:
    """Finds the end of a JSON object that arrives in pieces, without looking at any character twice."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._is_in_string, self._is_escaped = depth, False, False
        self.is_broken = False  # ended by what no JSON has

    def find(self, text: str, start: int = 0) -> int | None:
        """Return where the object ends in the next piece, None if it goes on."""
        place = start
        if self._is_escaped and place < len(text):
            self._is_escaped = False
            place += 1
        while found := (_INSIDE if self._is_in_string else _OUTSIDE).search(text, place):
            mark, place = found[0], found.end()
            if mark == '"':
                self._is_in_string = not self._is_in_string
            elif mark == "\\":
                self._is_escaped = place == len(text)
                place += 1
            elif mark == "<":
                self.is_broken = True
                return place - 1
            else:
                self._depth += _STEPS[mark]
                if self._depth <= 0:
                    return place
        return None


class CallingParser(BufferedParser, ABC):
    """Content, calls, and what one call has in common with another.

    Whitespace in front of a call is dropped, and so is what follows the last one.
    """

    tags: tuple[str, ...]
    """What begins calls."""

    def __init__(self, tools: Sequence[FunctionTool] | None) -> None:
        super().__init__()
        self.tools: Mapping[str, FunctionTool] | None = (
            None if tools is None else {tool.name: tool for tool in tools}
        )
        self.num_calls = 0
        self.space = ""  # whitespace that is content unless a call or the end follows
        self.state = self.read_content

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def knows(self, name: object) -> bool:
        """Say whether a name is that of a tool."""
        if not isinstance(name, str) or not name:
            return False
        return self.tools is None or name in self.tools

    def read_content(self) -> bool:
        """Report content up to what may be a call, which `begin` then reads."""
        end = tag_start(self.text, self.tags)
        is_tag = any(self.text.startswith(tag, end) for tag in self.tags)
        if self.is_over and not is_tag:
            end = len(self.text)
        self.add_content(self.take(end))
        if is_tag:
            self.state = self.begin
            return True
        if self.is_over and self.space:
            if not self.num_calls:
                self.add(Content(self.space))
            self.space = ""
        return False

    @abstractmethod
    def begin(self) -> bool:
        """Read what follows a tag, which is at the front of the text."""

    def add_content(self, text: str) -> None:
        """Report content, and keep whitespace at its end."""
        kept = text.rstrip()
        if kept:
            self.add(Content(self.space + kept))
            self.space = text[len(kept) :]
        else:
            self.space += text

    def start_call(self, name: str) -> None:
        """Report that a call begins."""
        self.space = ""
        self.add(ToolCallStart(self.num_calls, self.new_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Report a part of the arguments of the call that began last."""
        self.add(ToolCallArguments(self.num_calls - 1, text))


class JSONCallParser(CallingParser):
    """Calls that are JSON objects with a name and arguments, behind the first of the tags.

    `read_call` reads one from the front of the text; then comes `after_call`, or `give_back` if it is none.
    """

    separator, list_end = "", ""
    """What stands between two calls, and what ends a list of them."""
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    _other_keys = ("name", "id", "type")

    def __init__(self, tools: Sequence[FunctionTool] | None) -> None:
        super().__init__(tools)
        keys = "|".join(self.arguments_keys)
        others = "|".join((*self._other_keys, *self.arguments_keys))
        s = r"\s{0,64}"  # bounded, like names, as the head is read again with each delta
        self._head = re.compile(rf'\{{{s}"name"{s}:{s}"([^"\\]{{0,128}})"{s},{s}"(?:{keys})"{s}:{s}(?=\{{)')
        self._may_be = re.compile(rf'\{{{s}(?:\Z|"(?:[a-z]{{0,16}}\Z|(?:{others})"))')
        self.opening = ""  # what was taken in front of what may be a call
        self._num_reread = 0
        self._end: JSONEnd | None = None  # of the arguments, then of the call
        self._num_seen = 0  # characters of the text in which the end has been looked for

    def begin(self) -> bool:
        """Pass over the tag and whitespace."""
        return self.open_call(self.text[len(self.tags[0]) :].lstrip())

    def open_call(self, body: str) -> bool:
        """Pass over what is in front of a body, and read a call there if it begins like one."""
        if not body and not self.is_over:
            return False
        self.opening = self.take(len(self.text) - len(body))
        self.state = self.read_call if body.startswith("{") else self.give_back
        return True

    def give_back(self) -> bool:
        """Report as content what was taken for the beginning of a call; behind a tag another may begin."""
        self.text = self.opening + self.text
        tag = self.tags[0]
        self.add_content(self.take(len(tag) if self.text.startswith(tag) else len(self.opening)))
        self.opening = ""
        self.state = self.read_content
        return True

    def after_call(self) -> bool:
        """Read another call behind a separator, or the end of a list."""
        rest = self.text.lstrip()
        body = rest.removeprefix(self.separator).lstrip()
        if not body and not self.is_over:
            return False
        if rest.startswith(self.separator) and body.startswith("{"):
            return self.open_call(body)
        if self.list_end and rest.startswith(self.list_end):
            self.text = rest.removeprefix(self.list_end)
        self.state = self.read_content
        return True

    def read_call(self) -> bool:
        """Read the beginning of an object, at the front of the text: a call, or content."""
        if head := self._head.match(self.text):
            if not self.knows(head[1]):
                return self._refuse()
            self._end, self._num_seen = None, 0
            self.start_call(head[1])
            self.take(head.end())
            return self.pass_arguments(JSONEnd(), self._read_rest)
        if not self._may_be.match(self.text):
            return self._refuse()
        return self._read_whole()

    def _refuse(self, num_read: int = 0) -> bool:
        """Leave an object that is not a call, of which so many characters have been read."""
        self._end, self._num_seen = None, 0
        self._num_reread += num_read
        if num_read == 0 or self._num_reread <= _MAX_REREAD:
            self.state = self.give_back
            return True
        self.add_content(self.opening + self.take(num_read))
        self.opening = ""
        self.state = self.read_content
        return True

    def _read_whole(self) -> bool:
        """Read a call whose name comes last, or with other keys: only at its end is it known to be one."""
        if self._end is None:
            self._end, self._num_seen = JSONEnd(), 0
        end = self._end.find(self.text, self._num_seen)
        self._num_seen = len(self.text)
        if end is None and not self.is_over and self._num_seen <= _MAX_UNDECIDED:
            return False
        is_call = end is not None and end <= _MAX_UNDECIDED and not self._end.is_broken
        found = self._call_of(self.text[:end]) if is_call else None
        if found is None:
            return self._refuse(self._num_seen if end is None else end)
        self._end, self._num_seen = None, 0
        self.take(end or 0)
        self.start_call(found[0])
        self.add_arguments(found[1])
        self.state = self.after_call
        return True

    def _call_of(self, text: str) -> tuple[str, str] | None:
        """Return the name and arguments of a call, None if a text is not one."""
        try:
            call: Any = json.loads(text)
        except (ValueError, RecursionError):
            return None
        arguments: Any = next((call[key] for key in self.arguments_keys if key in call), {})
        if not self.knows(call.get("name")) or not isinstance(arguments, dict):
            return None
        return call["name"], dumped(arguments)

    def pass_arguments(self, end: JSONEnd, then: Callable[[], bool]) -> bool:
        """Report arguments as they arrive, and go on with a state behind them."""

        def read() -> bool:
            place = end.find(self.text)
            self.add_arguments(self.take(len(self.text) if place is None else place))
            if place is None:
                return False
            self.state = then
            return True

        self.state = read
        return True

    def _read_rest(self) -> bool:
        """Skip what an object has behind its arguments, usually a brace."""
        if self._end is None:
            self._end = JSONEnd(depth=1)
        place = self._end.find(self.text)
        self.take(len(self.text) if place is None else place)
        if place is None:
            return False
        self._end = None
        self.state = self.after_call
        return True


def call_tags(
    tools: Sequence[FunctionTool], begin: str, end: str, *, by_schema: bool, style: str = "json"
) -> list[dict[str, Any]]:
    """Return a tag for each tool; `begin` has `{name}` in place of its name.

    Arguments are any object unless `by_schema` or the tool is strict.
    """
    return [
        {
            "type": "tag",
            "begin": begin.replace("{name}", tool.name),
            "content": _arguments(tool, style, by_schema=by_schema or tool.is_strict),
            "end": end,
        }
        for tool in tools
    ]


def _arguments(tool: FunctionTool, style: str, *, by_schema: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if by_schema:  # as in OpenAI's API, a function without a schema has no parameters
        schema |= tool.parameters or {"properties": {}, "additionalProperties": False}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": schema, "style": style}
    return form | {"max_whitespace_cnt": _MAX_SPACE} if style == "json" else form


def calls_or_text(
    tags: list[dict[str, Any]],
    triggers: Collection[str],
    *,
    is_required: bool,
    is_parallel: bool,
    separator: str = "\n",
) -> dict[str, Any]:
    """Return a structural tag of calls: nothing but calls if they are required, else among any text."""
    shared = {"tags": tags, "stop_after_first": not is_parallel}
    if is_required:
        form = {"type": "tags_with_separator", "separator": separator, "at_least_one": True, **shared}
    else:
        form = {"type": "triggered_tags", "triggers": list(triggers), "at_least_one": False, **shared}
    return {"type": "structural_tag", "format": form}
