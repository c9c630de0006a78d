"""JSON schemas drawn from a seed, each odder than those before it.

Flat objects first, then references, alternatives, patterns, formats, limits, depth, names beyond ASCII,
recursion, and keywords that are refused.
"""

from __future__ import annotations

import random
from typing import Any

NUM_SCHEMAS = 500
_NAMES = ["name", "age", "city", "tags", "price", "is_open", "note", "id", "unit", "kind", "date", "size"]
_ODD_NAMES = ["größe", "名前", "a b", "x/y", "ключ", "$ref", "😀", 'quo"te', "tab\there", "", "a~b", "0"]
_WORDS = ["red", "green", "blue", "yes", "no", "Oslo", "Lena", "ä", "two words", "ß"]
_PATTERNS = [
    r"^[A-Z]{2}-[0-9]{3}$",
    r"^\d{1,4}$",
    r"^(red|green|blue)$",
    r"^[a-z]+(-[a-z]+){0,2}$",
    r"^#[0-9a-f]{6}$",
    r"^v\d+\.\d+\.\d+$",
    r"^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$",
    r"^\+?[0-9]{6,12}$",
    r"[0-9]",
    r"^(?:a|b(?:c|d)*)?$",
]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration"]
_REFUSED: list[dict[str, Any]] = [
    {"type": "string", "not": {"enum": ["no"]}},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "number", "multipleOf": 0.25},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "string", "format": "regex"},
    {"type": "string", "pattern": r"^(?!x)[a-z]+$"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"$ref": "https://example.com/other.json"},
]


class Schemas:
    """Draws schemas. `oddity`, 0 to 1, says which features may come and how deep they nest."""

    def __init__(self, chance: random.Random, oddity: float) -> None:
        self._chance, self._oddity = chance, oddity
        self._definitions: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        """Return a schema: mostly of an object, with what it refers to."""
        chance = self._chance
        schema = self._object(1 + round(3 * self._oddity))
        if self._oddity > 0.3 and chance.random() < 0.2:
            schema = {"anyOf": [schema, self._object(1)]}
        if self._oddity > 0.5 and chance.random() < 0.15:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}
        if self._oddity > 0.6 and chance.random() < 0.2 and schema.get("type") == "object":
            parts = [schema, self._object(1)]
            for part in parts:
                part.pop("additionalProperties", None)  # or each would forbid what the other requires
            schema = {"allOf": parts}
        if self._oddity > 0.7 and chance.random() < 0.15:
            self._definitions["tree"] = {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
            }
            schema = {"$ref": "#/$defs/tree"}
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "drawn", **schema}

    def _object(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        names = chance.sample(_NAMES, chance.randint(1, 4))
        if self._oddity > 0.4 and chance.random() < 0.4:
            names += chance.sample(_ODD_NAMES, 1)
        properties = {name: self._value(depth - 1) for name in names}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        schema["required"] = names if chance.random() < 0.6 else chance.sample(names, 1)
        if chance.random() < 0.5:
            schema["additionalProperties"] = False
        if self._oddity > 0.5 and chance.random() < 0.1:
            schema |= {"minProperties": 1, "maxProperties": len(names)}
        return schema

    def _value(self, depth: int) -> Any:
        chance, kinds = self._chance, [self._string, self._number, self._choice]
        if depth > 0:
            kinds += [self._array, self._object]
        if self._oddity > 0.2:
            kinds += [self._nullable]
            if depth > 0:
                kinds += [self._alternatives, self._reference]
        made = chance.choice(kinds)(depth)
        if chance.random() < 0.2:
            made = {**made, "description": "what it is"}
        return made

    def _string(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        schema: dict[str, Any] = {"type": "string"}
        kind = chance.random()
        if self._oddity > 0.1 and kind < 0.25:
            return schema | {"pattern": chance.choice(_PATTERNS)}
        if self._oddity > 0.1 and kind < 0.5:
            return schema | {"format": chance.choice(_FORMATS)}
        if kind < 0.9:
            schema["maxLength"] = chance.choice([5, 12, 40])
            if chance.random() < 0.3:
                schema["minLength"] = chance.choice([1, 3])
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        kind = chance.choice(["integer", "number", "boolean"])
        schema: dict[str, Any] = {"type": kind}
        if kind == "boolean":
            return schema
        if chance.random() < 0.5:
            low = chance.randint(-100, 100)
            schema[chance.choice(["minimum", "exclusiveMinimum"])] = low
            if chance.random() < 0.6:
                schema[chance.choice(["maximum", "exclusiveMaximum"])] = low + chance.randint(2, 1000)
        return schema

    def _choice(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        if chance.random() < 0.2:
            return {"const": chance.choice([1, "fixed", None, True, 2.5, {"a": [1]}])}
        values: list[Any] = chance.sample(_WORDS, chance.randint(1, 5))
        if self._oddity > 0.3:
            values += chance.sample([1, None, 2.5, False], chance.randint(0, 2))
        return {"enum": values}

    def _array(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        schema: dict[str, Any] = {"type": "array", "items": self._value(depth - 1)}
        if chance.random() < 0.8:
            schema["maxItems"] = chance.randint(1, 4)
        if chance.random() < 0.4:
            schema["minItems"] = 1
        if self._oddity > 0.4 and chance.random() < 0.2:
            schema |= {"prefixItems": [self._value(0), self._value(0)], "items": False, "maxItems": 2}
        return schema

    def _nullable(self, depth: int) -> dict[str, Any]:
        kind = self._chance.choice(["string", "integer", "boolean"])
        limit = {"maxLength": 12} if kind == "string" else {}
        return {"type": [kind, "null"], **limit}

    def _alternatives(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        if self._oddity > 0.5 and chance.random() < 0.4:
            tagged = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": tag}, tag: self._value(0)},
                    "required": ["kind", tag],
                }
                for tag in chance.sample(_NAMES[:9], 2)
            ]
            return {"oneOf": tagged}
        return {"anyOf": [self._value(depth - 1) for _ in range(chance.randint(2, 3))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._value(depth - 1)
        return {"$ref": f"#/$defs/{name}"}


def schemas(seed: int = 0, number: int = NUM_SCHEMAS) -> list[dict[str, Any]]:
    """Return schemas, each odder than the ones before it; among the odder ones some that are refused."""
    chance = random.Random(seed)
    drawn = [Schemas(chance, place / number).whole() for place in range(number)]
    for place in range(number // 2, number):
        if chance.random() < 0.12:
            chosen = drawn[place]
            inner = chance.choice(_REFUSED)
            drawn[place] = {
                "type": "object",
                "properties": {"plain": chosen, "odd": inner},
                "required": ["odd"],
            }
            definitions = chosen.pop("$defs", None)
            if definitions:
                drawn[place]["$defs"] = definitions
    return drawn
