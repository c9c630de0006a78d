"""Rewrites the JSON schemas within a structural tag, as the schema of a whole answer is.

What a schema of a tag says is asserted or refused by name, so that the arguments of a forced call match.
"""

from __future__ import annotations

import json
from typing import Any

from sagellm.core.errors import InvalidRequestError
from sagellm.engines.grammar.binding import xgrammar_core
from sagellm.engines.grammar.json_schema import lowered_schema

_SCHEMA_FORMATS = ("json_schema", "qwen_xml_parameter")
_NOT_ASSERTED = {
    "any_order": "required properties could be missing",
    "excludes": "it is passed over for texts with a pattern, and takes the place of lengths",
}
_MAX_SHOWN = 60


def lowered_tags(text: str, *, additional_properties: bool, max_whitespace: int) -> str:
    """Return a structural tag with its schemas rewritten, as JSON.

    Raises InvalidRequestError, which names the text before a schema, the keyword and where it stands.
    """
    try:
        structure = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"it is not valid JSON: {error}") from None
    try:
        found = _Tags(additional_properties, max_whitespace).part(structure, "")
        return json.dumps(found, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError("it is nested too deeply; give a flatter one") from None


class _Tags:
    """Walks the formats of one structural tag; `before` is the text that stands before a part."""

    def __init__(self, additional_properties: bool, max_whitespace: int) -> None:  # noqa: FBT001
        self._additional_properties, self._max_whitespace = additional_properties, max_whitespace

    def part(self, part: Any, before: str) -> Any:
        """Return a part with its schemas rewritten."""
        if isinstance(part, list):
            found = []
            for each in part:
                found.append(self.part(each, before))
                before = _text_of(each) or before
            return found
        if not isinstance(part, dict):
            return part
        if part.get("type") in _SCHEMA_FORMATS and "json_schema" in part:
            try:
                return self._with_schema(part)
            except InvalidRequestError as error:
                place = f"after {before[-_MAX_SHOWN:]!r}, " if before else ""
                raise InvalidRequestError(f"{place}{error}") from None
        before = _text_of(part.get("begin")) or before
        return {name: self.part(value, before) for name, value in part.items()}

    def _with_schema(self, part: dict[str, Any]) -> dict[str, Any]:
        for name, why in _NOT_ASSERTED.items():
            if part.get(name):
                raise InvalidRequestError(f"{name} is not supported: {why}")
        schema = lowered_schema(part["json_schema"], additional_properties=self._additional_properties)
        found = {**part, "json_schema": schema}
        if part["type"] == "json_schema" and part.get("style", "json") == "json":
            given = part.get("max_whitespace_cnt")
            most = self._max_whitespace
            if most == 0:  # which a tag cannot say
                return {"type": "grammar", "grammar": _compact(schema)}
            found["max_whitespace_cnt"] = min(given, most) if isinstance(given, int) else most
        return found


def _compact(schema: Any) -> str:
    """Return the grammar of a JSON text without white space."""
    make = xgrammar_core().Grammar.from_json_schema
    return str(make(json.dumps(schema), False, None, (",", ":"), False, None, False, False).to_string())


def _text_of(part: Any) -> str:
    """Return the text that a part is, empty if it is another kind of part."""
    if isinstance(part, dict) and part.get("type") == "const_string":
        part = part.get("value")
    return part if isinstance(part, str) else ""
