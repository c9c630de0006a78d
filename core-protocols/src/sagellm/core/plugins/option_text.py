"""How options are written as text: `qos{within=reuse, shares={a=1, b=2}, order=[x, y]}`.

Flow style of YAML with `=` as another word for `: `, so that what people write in either form is read:

    value    := mapping | list | quoted | word
    mapping  := { key = value , … }        list := [ value , … ]
    quoted   := "JSON's string" | 'no escapes, '' for a quote'
    word     := null, true, false (~, yes, no, on, off too), a number, or else the text as it stands

The same text comes from flags, variables, configuration files and running engines' operators; `options_text`
writes what is read here. A list of providers is the inside of a list of values, where `slot=name{…}` names
the slot that a provider takes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.errors import ConfigError, nearest

MAX_CHARACTERS = 64 << 10
_MAX_DEPTH = 32
_MAX_DIGITS = 40
BOOLEANS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_WORDS = {"null": None, "~": None, "": None, **BOOLEANS}
_NUMBER = re.compile(r"[-+]?(?:\d+|(?=\.?\d)\d*\.?\d*(?:[eE][-+]?\d+)?|\.?inf|\.?nan)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\']|\'\')*\'', re.DOTALL)
_WORD = re.compile(r"[^{}\[\],\"']+")
_KEY = re.compile(r"\s*(?P<key>[^{}\[\],=:\"']+?)\s*(?:=|:\s|:(?=[{\[\"']))")
_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
_SLOT = re.compile(r"\s*([^\W\d]\w*)\s*=\s*(.*)", re.DOTALL)
_MARK = re.compile(rf"{_QUOTED.pattern}|[{{}}\[\],]", re.DOTALL)


def read_value(text: str) -> Any:
    """Return the mapping, list or plain value of a text. Raises ConfigError, whose message calls it "it"."""
    return _Reader(text).whole()


def options_text(options: Mapping[str, Any]) -> str:
    """Return `{option=value, …}`; texts stand without quotes where they are read as texts."""
    return "{" + ", ".join(f"{name}={_value_text(value)}" for name, value in options.items()) + "}"


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes; the whole may stand in square brackets.

    Raises ConfigError, whose message calls the text "it", for brackets that do not match.
    """
    text = text.strip()
    if text[:1] == "[" and text[-1:] == "]":
        text = text[1:-1]
    depth, start, parts = 0, 0, []
    for mark in _MARK.finditer(text):
        depth += (mark[0] in "{[") - (mark[0] in "}]")
        if mark[0] == "," and depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    marks = [mark[0] for mark in _MARK.finditer(text)]
    if marks.count("[") != marks.count("]"):
        raise ConfigError("its square brackets do not match")
    items = [part.strip() for part in (*parts, text[start:]) if part.strip()]
    return [read_value(item) if item[0] in "\"'" else item for item in items]


def slot_of(item: Any) -> tuple[str, Any]:
    """Return the slot and the provider of `slot=name{…}`; the slot of anything else is ""."""
    match = _SLOT.fullmatch(item) if isinstance(item, str) else None
    return (match[1], match[2].rstrip()) if match else ("", item)


def read_slots(items: Any, key: str, slots: Sequence[str]) -> dict[str, Any]:
    """Return what `order=priority,mine{limit=3},share=none` names: by slot, and the others as `passes`.

    Takes the items of such a text too, and anything else as `passes`. `slots` are those that there are.
    Raises ConfigError, which begins with the setting's key.
    """
    if isinstance(items, str):
        try:
            items = split(items)
        except ConfigError as error:
            raise ConfigError(f"{key} cannot be read: {error}") from None
    if not isinstance(items, list | tuple):
        return {"passes": items}
    pairs = list(map(slot_of, items))
    named = [slot for slot, _ in pairs if slot]
    for slot in named:
        if slot not in slots:
            raise ConfigError(
                f"{key} names the stage {slot!r}; the stages are {', '.join(slots)}; name a pass without a "
                f"stage alone.{nearest(slot, slots)}"
            )
        if named.count(slot) > 1:
            raise ConfigError(f"{key} has the stage {slot} twice; give it once")
    return {slot: each for slot, each in pairs if slot} | {
        "passes": tuple(each for slot, each in pairs if not slot)
    }


def _value_text(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if isinstance(value, Mapping):
        return options_text(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


class _Reader:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"it is longer than {MAX_CHARACTERS:,} characters")
        self._text = text
        self._at = 0

    def whole(self) -> Any:
        """Return the value of the whole text."""
        value = self._value(0)
        if self._at < len(self._text):
            raise self._fault("a value ends, and more follows")
        return value

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ConfigError(f"it is nested more than {_MAX_DEPTH} deep")
        self._skip()
        first = self._text[self._at : self._at + 1]
        if first == "{":
            found: Any = self._mapping(depth)
        elif first == "[":
            found = self._list(depth)
        elif first and first in "\"'":
            found = self._quoted()
        else:
            word = _WORD.match(self._text, self._at)
            self._at = word.end() if word else self._at
            return _plain(word[0].strip() if word else "")
        self._skip()
        return found

    def _mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._next("}", "{"):
            key = self._key()
            if key in found:
                raise self._fault(f"{key!r:.40} is given twice; keep one")
            found[key] = self._value(depth + 1)
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while self._next("]", "["):
            found.append(self._value(depth + 1))
        return found

    def _next(self, end: str, begin: str) -> bool:
        """Move to the next entry of a mapping or list, or past its end; say whether there is one."""
        self._skip()
        mark = self._text[self._at : self._at + 1]
        if mark not in (begin, ",", end) or not mark:
            raise self._fault(f"{end} or a comma is missing")
        self._at += 1
        self._skip()
        if mark != end and self._text.startswith(end, self._at):  # nothing in it, or a comma at its end
            self._at += 1
            mark = end
        return mark != end

    def _key(self) -> str:
        if self._text[self._at : self._at + 1] in ('"', "'"):
            key = self._quoted()
            self._skip()
            if self._text[self._at : self._at + 1] not in ("=", ":"):
                raise self._fault("a name and = are missing")
            self._at += 1
            return key
        match = _KEY.match(self._text, self._at)
        if match is None:
            raise self._fault("a name and = are missing")
        self._at = match.end()
        return match["key"]

    def _quoted(self) -> str:
        match = _QUOTED.match(self._text, self._at)
        if match is None:
            raise self._fault("a quote does not end")
        self._at = match.end()
        if match[0][0] == "'":
            return match[0][1:-1].replace("''", "'")
        try:
            return str(json.loads(match[0], strict=False))
        except ValueError:
            raise self._fault("a text in double quotes has a wrong escape before it") from None

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _fault(self, what: str) -> ConfigError:
        return ConfigError(f"it is wrong at character {self._at + 1}: {what}")


def _plain(word: str) -> Any:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if not _NUMBER.fullmatch(word):
        return word
    if sum(map(str.isdigit, word)) > _MAX_DIGITS:
        raise ConfigError(f"it has a number of more than {_MAX_DIGITS} digits")
    if re.fullmatch(r"[-+]?\d+", word):
        return int(word)
    number = float(word.replace(".inf", "inf").replace(".nan", "nan"))
    return word if math.isnan(number) else number
