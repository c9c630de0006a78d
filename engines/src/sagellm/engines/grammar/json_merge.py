"""Merges alternatives of JSON schemas: what matches the result matches both."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Alternative = dict[str, Any]
"""A reference (`$ref`), some values (`enum`), a `type` with keywords of that type, or, empty, everything."""

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class Merging:
    """`expand` returns the alternatives of a reference, `refuse` makes the error for a place."""

    def __init__(
        self,
        expand: Callable[[str, str], list[Alternative]],
        refuse: Callable[[str, str], Exception],
    ) -> None:
        self._expand, self._refuse = expand, refuse

    def merge(self, one: Alternative, other: Alternative, where: str) -> list[Alternative]:
        """Return the alternatives of what matches both; none if nothing does."""
        if not one or not other or one == other:
            return [other or one]
        for part, rest in ((one, other), (other, one)):
            if "$ref" in part:
                expanded = self._expand(part["$ref"], where)
                return [merged for each in expanded for merged in self.merge(each, rest, where)]
            if "enum" in part and "$ref" not in rest:
                return self._filtered(part["enum"], rest, where)
        kinds = {one["type"], other["type"]}
        if len(kinds) > 1 and kinds != {"integer", "number"}:
            return []
        return [self._merged(one, other, where)]

    def _merged(self, one: Alternative, other: Alternative, where: str) -> Alternative:
        """Merge two of the same type, or an integer and a number."""
        merged = {"type": "integer" if "integer" in (one["type"], other["type"]) else one["type"]}
        for keyword in dict.fromkeys((*one, *other)):
            if keyword == "type":
                continue
            if keyword in one and keyword in other:
                merged[keyword] = self._both(keyword, one[keyword], other[keyword], where)
            else:
                merged[keyword] = one.get(keyword, other.get(keyword))
        if merged["type"] == "object":
            self._merge_names(merged, one, other, where)
        if merged["type"] == "array":
            self._merge_items(merged, one, other)
        return merged

    def _filtered(self, values: list[Any], other: Alternative, where: str) -> list[Alternative]:
        kept = []
        for value in values:
            is_accepted = accepts(other, value)
            if is_accepted is None:
                raise self._refuse(where, "enum or const with an object or a list is not supported beside it")
            if is_accepted:
                kept.append(value)
        return [{"enum": kept}] if kept else []

    def _both(self, keyword: str, one: Any, other: Any, where: str) -> Any:
        """Return the value of a keyword that both have."""
        if keyword in _LOWER:
            return max(one, other)
        if keyword in _UPPER:
            return min(one, other)
        if keyword == "required":
            return list(dict.fromkeys([*one, *other]))
        if keyword == "uniqueItems":
            return one or other
        if one == other:
            return one
        if keyword in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"):
            return _all_of(one, other)
        if keyword in ("properties", "prefixItems"):  # merged with what the others say of them
            return one
        raise self._refuse(f"{where}/{keyword}", "two of it that differ are not merged; give one")

    def _merge_names(self, merged: Alternative, one: Alternative, other: Alternative, where: str) -> None:
        """Merge properties: one that only one side names must match what the other says of further ones."""
        ours, theirs = one.get("properties", {}), other.get("properties", {})
        if not ours and not theirs:
            return
        for side in (one, other):
            limited = side.get("patternProperties") or side.get("propertyNames")
            if limited and (ours if side is other else theirs):
                raise self._refuse(where, "patternProperties and propertyNames are not merged with others")
        rest_of_one, rest_of_other = (each.get("additionalProperties", True) for each in (one, other))
        merged["properties"] = {
            name: _all_of(ours.get(name, rest_of_one), theirs.get(name, rest_of_other))
            for name in dict.fromkeys((*ours, *theirs))
        }

    def _merge_items(self, merged: Alternative, one: Alternative, other: Alternative) -> None:
        ours, theirs = one.get("prefixItems", []), other.get("prefixItems", [])
        rest_of_one, rest_of_other = one.get("items", True), other.get("items", True)
        length = max(len(ours), len(theirs))
        if length:
            merged["prefixItems"] = [
                _all_of(
                    ours[place] if place < len(ours) else rest_of_one,
                    theirs[place] if place < len(theirs) else rest_of_other,
                )
                for place in range(length)
            ]


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one in (True, {}) or one == other:
        return other
    return one if other in (True, {}) else {"allOf": [one, other]}


def accepts(alternative: Alternative, value: Any) -> bool | None:
    """Say whether a value matches; None if that is not known."""
    if not alternative:
        return True
    if "enum" in alternative:
        return any(_is_same(each, value) for each in alternative["enum"])
    if "$ref" in alternative:
        return None
    kind = alternative["type"]
    if not _is_of(kind, value):
        return False
    if len(alternative) == 1:
        return True
    if kind in ("integer", "number"):
        return _is_within(alternative, value)
    return _has_form(alternative, value) if kind == "string" else None


def _is_of(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    types: dict[str, type | tuple[type, ...]] = {
        "null": type(None),
        "number": (int, float),
        "string": str,
        "array": list,
        "object": dict,
    }
    return kind in types and isinstance(value, types[kind])


def _is_within(given: Alternative, value: float) -> bool:
    step = given.get("multipleOf")
    return (
        given.get("minimum", value) <= value <= given.get("maximum", value)
        and not ("exclusiveMinimum" in given and value <= given["exclusiveMinimum"])
        and not ("exclusiveMaximum" in given and value >= given["exclusiveMaximum"])
        and (step is None or (step != 0 and float(value / step).is_integer()))
    )


def _has_form(given: Alternative, value: str) -> bool | None:
    if not given.get("minLength", 0) <= len(value) <= given.get("maxLength", len(value)):
        return False
    if "format" in given:
        return None
    try:
        return "pattern" not in given or re.search(given["pattern"], value) is not None
    except (re.error, OverflowError, RecursionError):
        return None


def _is_same(one: Any, other: Any) -> bool:
    """Compare as JSON does: 1 is 1.0, and neither is true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)
