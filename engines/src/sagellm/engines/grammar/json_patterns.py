"""Patterns and formats of JSON schemas, as regular expressions that xgrammar matches whole and asserts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from sagellm.core.errors import InvalidRequestError, nearest
from sagellm.engines.grammar.pattern_lengths import with_lengths

_TOKEN = re.compile(
    r"(?P<escape>\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.))"
    r"|(?P<set>\[\^?(?:\\.|[^\]\\])+\])"
    r"|(?P<group>\((?:\?:|(?!\?)))"
    r"|(?P<repeat>\{\d+(?:,\d*)?\})"
    r"|(?P<other>.)",
    re.DOTALL,
)
_ANY = ".*"
_END = ""  # of a name, in a tree of names
_OPTIONAL = "{0,1}"  # xgrammar 0.2 reads `(ab*)?` of a schema's pattern as `a?b*`
_OUTSIDE_TEXT = ('"', "\\")
_ESCAPES = frozenset("dwsDWS")
_LITERAL_ESCAPES = frozenset("^$.*+?()[]{}|/-_@#%&=:;,!~<>' ")
_COMPLEMENTS = {"\\W": r"[ !#-/:-@\[\]\^`{-~]", "\\D": r"[ !#-/:-\[\]-~]"}
"""What is not a letter or a digit, within ASCII: beyond it, readers of patterns differ."""
_BEYOND_ASCII = "\x80-\U0010ffff"


def whole_pattern(pattern: str) -> str:
    """Return what a text that contains a match of a pattern matches as a whole.

    Raises InvalidRequestError, which names what is not supported: look-around, references, classes that
    depend on Unicode, boundaries within a pattern, and what would have to be escaped in a JSON text.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"the pattern {_shown(pattern)} is not valid: {error}") from None
    alternatives = [_whole(tokens, pattern) for tokens in _alternatives(pattern)]
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def _alternatives(pattern: str) -> list[list[str]]:
    """Return the tokens of each alternative outside all groups."""
    found: list[list[str]] = [[]]
    depth = 0
    for match in _TOKEN.finditer(pattern):
        token = match[0]
        kind = match.lastgroup
        if kind == "escape":
            token = _escape(token, pattern)
        elif kind == "set":
            token = _set(token, pattern)
        elif kind == "group":
            depth += 1
        elif kind == "other":
            _check_other(token, depth, pattern)
            depth -= token == ")"
            if token == "?" and found[-1][-1:] == [")"]:
                token = _OPTIONAL
            if token == "|" and not depth:
                found.append([])
                continue
        found[-1].append(token)
    return found


def _whole(tokens: list[str], pattern: str) -> str:
    starts, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    inner = tokens[starts : len(tokens) - ends]
    if "^" in inner or "$" in inner:
        raise _unsupported(pattern, "^ or $ within it")
    return ("" if starts else _ANY) + "".join(inner) + ("" if ends else _ANY)


def _escape(token: str, pattern: str) -> str:
    if token in _COMPLEMENTS:
        return _COMPLEMENTS[token]
    if len(token) > 2:
        character = chr(int(token[2:], 16))
        if character in _OUTSIDE_TEXT or not character.isprintable():
            raise _unsupported(pattern, token)
        return character if character.isalnum() else re.escape(character)
    if token[1] not in _ESCAPES and token[1] not in _LITERAL_ESCAPES:
        raise _unsupported(pattern, token)
    return token


def _set(token: str, pattern: str) -> str:
    if '"' in token:
        raise _unsupported(pattern, 'a " within it')
    for escape in re.findall(r"\\(.)", token):
        if escape not in "dws" and escape not in _LITERAL_ESCAPES:
            raise _unsupported(pattern, f"\\{escape} in {token}")
    if token.startswith("[^") and re.search(r"\\[dw]", token):
        token = f"{token[:-1]}{_BEYOND_ASCII}]"
    return _within_text(token)


def _within_text(token: str) -> str:
    """Return a set without what ends a JSON text; of what is not ASCII, xgrammar negates without that."""
    is_open = token.startswith("[^") and not token.isascii()
    return rf'{token[:-1]}"\\\x00-\x1f]' if is_open else token


def _check_other(token: str, depth: int, pattern: str) -> None:
    if token == "(":
        raise _unsupported(pattern, "a group that begins with (?")
    if token in _OUTSIDE_TEXT or not token.isprintable():
        raise _unsupported(pattern, f"{token!r}, which a JSON text must escape")
    if depth and token in "^$":
        raise _unsupported(pattern, f"{token} in a group")


def limited(whole: str, fewest: int, most: float) -> str | None:
    """Return a whole pattern for texts of so many characters, None if there are none.

    Raises InvalidRequestError where the limits cannot be written into the pattern.
    """
    return with_lengths([match[0] for match in _TOKEN.finditer(whole)], fewest, most)


def other_names(names: Iterable[str]) -> str:
    """Return what all names but these match, among those that a JSON text has without an escape."""
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for character in name:
            node = node.setdefault(character, {})
        node[_END] = {}
    return _other_than(root)


def _other_than(node: Mapping[str, Any]) -> str:
    """Return what the ends of names match that begin as a node does and are not in the tree.

    What has to be escaped is in none of them.
    """
    inner = {each: node[each] for each in node if each not in (_END, *_OUTSIDE_TEXT) and each >= " "}
    first = _within_text(f"[^{''.join(map(_in_set, inner))}]") if inner else "."
    parts = [first + _ANY, *(_alone(each) + _other_than(rest) for each, rest in inner.items())]
    return f"(?:{'|'.join(parts)})" + ("" if _END in node else _OPTIONAL)


def _in_set(character: str) -> str:
    return f"\\{character}" if character in "^]-[" else character


def _alone(character: str) -> str:
    return f"\\{character}" if character in "^$.*+?()[]{}|/" else character


def _unsupported(pattern: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the pattern {_shown(pattern)} has {what}, which is not supported")


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else f"{pattern[:80]}…")


_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # not the year 0
)
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[A-Za-z0-9]{1,9}(?:-[A-Za-z0-9]{1,9}){0,2}"  # `--` is for names that are encoded
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H16 = r"[0-9A-Fa-f]{1,4}"
_TIMES = r"(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*"
_HTTP = rf"(?:https?|ftp)://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_PATH})?"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:[0-9]+W|{_DAYS}(?:T{_TIMES})?|T{_TIMES})",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,16}}){{0,1}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": (
        rf"(?:(?:{_H16}:){{7}}{_H16}|(?:{_H16}:){{1,3}}(?::{_H16}){{1,4}}|::(?:{_H16}:){{0,4}}{_H16}|::)"
    ),
    "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
    "relative-json-pointer": r"(?:0|[1-9][0-9]{0,3})(?:#|(?:/(?:[^~/]|~[01])*)*)",
    "byte": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "uri": _HTTP,
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
}
"""What is generated for a format: texts that are of it, not all of them. Dates and times are RFC 3339's, a
uri is one of the web, hosts have at most eight short labels."""

_ALIASES = {
    **dict.fromkeys(("uri-reference", "iri", "iri-reference", "uri-template"), "uri"),
    **{"idn-email": "email", "idn-hostname": "hostname"},
}

FREE_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
"""What OpenAPI and pydantic call texts of which any is of the format."""

NUMBER_FORMATS: Mapping[str, tuple[float, float]] = {
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32)},
    **dict.fromkeys(("float", "double"), (-math.inf, math.inf)),
}
"""OpenAPI's formats of numbers: their limits."""


def format_pattern(name: object) -> str:
    """Return the pattern of a format. Raises InvalidRequestError for an unknown one."""
    found = FORMATS.get(_ALIASES.get(str(name), str(name)))
    if name in NUMBER_FORMATS:
        raise InvalidRequestError(f"the format {name} is one of numbers")
    if found is None:
        known = sorted({*FORMATS, *_ALIASES, *FREE_FORMATS, *NUMBER_FORMATS})
        told = nearest(str(name)[:64], known)
        raise InvalidRequestError(
            f"the format {_shown(str(name))} is not supported.{told} Supported are {', '.join(known)}"
        )
    return found.replace(")?", f"){_OPTIONAL}")
