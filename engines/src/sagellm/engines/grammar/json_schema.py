"""Rewrites a JSON schema (draft 2020-12) to one of which xgrammar asserts every keyword.

xgrammar reads a keyword only beside its `type`, takes `oneOf` for `anyOf` and a part of `allOf` for all of
it, and passes over others. So a schema becomes alternatives, each of one type with the keywords of that type:
keywords beside `anyOf` are merged into each of its parts, `allOf` merges all, references beside other
keywords are replaced by what they name. What cannot be merged, or would be ignored, is refused by name.

Texts that match the result are valid by the schema. Not every valid text matches: properties come in the
order of the schema, objects that name properties have no others unless the schema gives
`additionalProperties`, and a `format` has a simple form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from sagellm.core.errors import InvalidRequestError, nearest
from sagellm.engines.grammar.json_merge import Alternative, Merging, accepts
from sagellm.engines.grammar.json_patterns import (
    FREE_FORMATS,
    NUMBER_FORMATS,
    format_pattern,
    limited,
    other_names,
    whole_pattern,
)

MAX_ALTERNATIVES = 4096
"""Of one schema, after its parts are merged."""

_MAX_MULTIPLES = 1000
"""That are listed where both limits of a number are known."""

_MAX_STEP = 128  # xgrammar makes a state for each remainder

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
_TYPES_OF = {keyword: kind for kind, keywords in KEYWORDS.items() for keyword in keywords}
_COMBINERS = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
_ANNOTATIONS = frozenset(
    {
        *("$schema", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default"),
        *("examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator", "$vocabulary"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)
_REFUSED = {
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains"),
    *("minContains", "maxContains", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "additionalItems"),
}
_KNOWN = sorted({*_TYPES_OF, *_COMBINERS, *_ANNOTATIONS, *_REFUSED, "type", "$id"})
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def lowered(text: str, *, additional_properties: bool = False) -> str:
    """Return the rewritten schema as JSON. Raises what `lowered_schema` does, and if the text is not JSON."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not valid JSON: {error}") from None
    return json.dumps(lowered_schema(schema, additional_properties=additional_properties), ensure_ascii=False)


def lowered_schema(schema: Any, *, additional_properties: bool = False) -> dict[str, Any]:
    """Return the rewritten schema.

    `additional_properties` is for objects that name properties and do not say whether there may be others.
    Raises InvalidRequestError, which names the keyword and where it stands.
    """
    try:
        return _Lowering(schema, additional_properties).whole()
    except RecursionError:
        raise InvalidRequestError("the schema is nested too deeply; give a flatter one") from None


class _Lowering:
    """One schema; `where` is the place of a part in it, as a JSON pointer."""

    def __init__(self, root: Any, additional_properties: bool) -> None:  # noqa: FBT001
        self._root, self._open = root, additional_properties
        self._id = str(root.get("$id") or "") if isinstance(root, dict) else ""
        self._names: dict[str, str] = {}  # of definitions, by the reference
        self._waiting: list[str] = []
        self._expanding: list[str] = []
        self._merging = Merging(self._expanded, _refused)

    def whole(self) -> dict[str, Any]:
        """Return the lowered schema with its definitions."""
        found = self.lower(self._root, "")
        if found is None:
            raise _refused("", "no value matches it")
        definitions: dict[str, Any] = {}
        while self._waiting:
            reference = self._waiting.pop()
            lowered = self.lower(self._target(reference, reference), reference)
            if lowered is None:
                raise _refused(reference, "no value matches it")
            definitions[self._names[reference]] = lowered
        return {**found, "$defs": definitions} if definitions else found

    def lower(self, schema: Any, where: str) -> dict[str, Any] | None:
        """Return a part as xgrammar reads it, None if nothing matches it."""
        parts = [self._emit(each, where) for each in self.alternatives(schema, where)]
        found = [each for each in parts if each is not None]
        if {} in found:
            return {}
        unique = list({json.dumps(each): each for each in found}.values())
        return None if not unique else unique[0] if len(unique) == 1 else {"anyOf": unique}

    def alternatives(self, schema: Any, where: str) -> list[Alternative]:
        """Return what a part allows, as alternatives of one type each."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, dict):
            raise _refused(where, f"it is {_shown(schema)}; it must be an object, true or false")
        _check_names(schema, where, is_root=schema is self._root)
        found = _typed(schema, where)
        for keyword in _COMBINERS:
            if keyword not in schema:
                continue
            parts = self._combined(keyword, schema, f"{where}/{keyword}")
            found = self._merged(found, parts, where)
        return [_evaluated(each) for each in found]

    def _combined(self, keyword: str, schema: Mapping[str, Any], where: str) -> list[Alternative]:
        value = schema[keyword]
        if keyword == "$ref":
            return [{"$ref": self._reference(value, where)}]
        if keyword == "const":
            return [{"enum": [value]}]
        if not isinstance(value, list) or not value:
            raise _refused(where, "it must be a list of at least one")
        if keyword == "enum":
            return [{"enum": value}]
        parts = [self.alternatives(each, f"{where}/{place}") for place, each in enumerate(value)]
        if keyword == "allOf":
            found = parts[0]
            for part in parts[1:]:
                found = self._merged(found, part, where)
            return found
        if keyword == "oneOf":
            self._check_disjoint(parts, where)
        return [each for part in parts for each in part]

    def _merged(self, one: list[Alternative], other: list[Alternative], where: str) -> list[Alternative]:
        if len(one) * len(other) > MAX_ALTERNATIVES:
            raise _refused(where, f"its parts give more than {MAX_ALTERNATIVES} combinations")
        return [each for left in one for right in other for each in self._merging.merge(left, right, where)]

    def _check_disjoint(self, parts: list[list[Alternative]], where: str) -> None:
        """Refuse `oneOf` unless no value can match two of its parts."""
        expanded = [[leaf for each in part for leaf in self._leaves(each, where)] for part in parts]
        if sum(map(len, expanded)) > 256:
            raise _refused(where, "it has more than 256 alternatives; use anyOf")
        for place, part in enumerate(expanded):
            for number, other in enumerate(expanded[:place]):
                if any(self._may_overlap(left, right, where) for left in part for right in other):
                    raise _refused(
                        where, f"its parts {number} and {place} may both match; use anyOf, or tell them apart"
                    )

    def _leaves(self, alternative: Alternative, where: str) -> list[Alternative]:
        return self._expanded(alternative["$ref"], where) if "$ref" in alternative else [alternative]

    def _may_overlap(self, one: Alternative, other: Alternative, where: str) -> bool:
        """Say whether a value may match both, as far as types, values and required properties tell."""
        for part, whole in ((one, other), (other, one)):
            if "enum" in part:
                return any(accepts(whole, value) is not False for value in part["enum"])
        kinds = {one.get("type"), other.get("type")}
        if len(kinds) == 2 and None not in kinds and kinds != {"integer", "number"}:
            return False
        if kinds != {"object"}:
            return True
        for name in {*one.get("required", ())} & {*other.get("required", ())}:
            ours, theirs = (each.get("properties", {}).get(name, True) for each in (one, other))
            pairs = [self._flat(each, f"{where}/{name}") for each in (ours, theirs)]
            if all(not self._may_overlap(left, right, where) for left in pairs[0] for right in pairs[1]):
                return False
        return not (_is_shut_out(one, other) or _is_shut_out(other, one))

    def _flat(self, schema: Any, where: str) -> list[Alternative]:
        return [leaf for each in self.alternatives(schema, where) for leaf in self._leaves(each, where)]

    def _expanded(self, reference: str, where: str) -> list[Alternative]:
        """Return the alternatives that a reference stands for. Refuses one that is within itself."""
        if reference in self._expanding:
            raise _refused(where, f"the reference {_shown(reference)} leads to itself beside other keywords")
        self._expanding.append(reference)
        try:
            found = self.alternatives(self._target(reference, where), reference)
            return [leaf for each in found for leaf in self._leaves(each, where)]
        finally:
            self._expanding.pop()

    def _reference(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise _refused(where, f"it is {_shown(value)}; it must be a text")
        reference = value
        if self._id and value.startswith(self._id):
            reference = value.removeprefix(self._id) or "#"
        if not reference.startswith("#"):
            raise _refused(where, f"it is {_shown(value)}; only references within the schema are followed")
        self._target(reference, where)
        return reference

    def _target(self, reference: str, where: str) -> Any:
        """Return the part that a reference names: by a pointer, or by an anchor."""
        path = unquote(reference[1:])
        if path and not path.startswith("/"):
            return _anchored(self._root, path, where)
        found = self._root
        for step in path.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise _refused(where, f"there is no {_shown(reference)} in the schema")
        return found

    def _emit(self, alternative: Alternative, where: str) -> dict[str, Any] | None:
        if "$ref" in alternative:
            return {"$ref": f"#/$defs/{self._name(alternative['$ref'])}"}
        if "enum" in alternative:
            return {"enum": alternative["enum"]} if alternative["enum"] else None
        emit: dict[str, Callable[[Alternative, str], dict[str, Any] | None]] = {
            "integer": _emit_number,
            "number": _emit_number,
            "string": _emit_string,
            "array": self._emit_array,
            "object": self._emit_object,
        }
        kind = alternative.get("type")
        return emit[kind](alternative, where) if kind in emit else dict(alternative)

    def _name(self, reference: str) -> str:
        if reference not in self._names:
            self._names[reference] = f"d{len(self._names)}"
            self._waiting.append(reference)
        return self._names[reference]

    def _emit_array(self, given: Alternative, where: str) -> dict[str, Any] | None:
        fewest, most = given.get("minItems", 0), given.get("maxItems", math.inf)
        if given.get("uniqueItems") and most > 1:
            raise _refused(f"{where}/uniqueItems", "items are not compared")
        first = given.get("prefixItems", [])
        prefix: list[dict[str, Any]] = []
        for place, each in enumerate(first[: int(min(most, len(first)))]):
            lowered = self.lower(each, f"{where}/prefixItems/{place}")
            if lowered is None:
                most = place
                break
            prefix.append(lowered)
        items = self.lower(given.get("items", True), f"{where}/items")
        if items is None:
            most = min(most, len(first))
        if fewest > most:
            return None
        prefix = prefix[: int(min(most, len(prefix)))]
        made: dict[str, Any] = {"type": "array", "items": False if most <= len(prefix) else items}
        made |= {"prefixItems": prefix} if prefix else {}
        made |= {"minItems": fewest} if fewest else {}
        return made if most == math.inf else {**made, "maxItems": int(most)}

    def _emit_object(self, given: Alternative, where: str) -> dict[str, Any] | None:
        required = list(dict.fromkeys(given.get("required", ())))
        named: Mapping[str, Any] = given.get("properties", {})
        others = given.get("additionalProperties")
        patterns = _patterns_of(given, others, where)
        if others is None:
            others = not (named or required or patterns) or self._open
        fallback = True if given.get("additionalProperties") is None else given["additionalProperties"]
        names = {**named, **{name: fallback for name in required if name not in named}}
        properties: dict[str, Any] = {}
        for name, each in names.items():
            lowered = self.lower(each, f"{where}/properties/{name}")
            if lowered is not None:
                properties[name] = lowered
            elif name in required:
                return None
        made: dict[str, Any] = {"type": "object"}
        made |= {"properties": properties} if properties else {}
        made |= {"required": required} if required else {}
        if patterns:
            ((pattern, value),) = patterns.items()
            lowered = self.lower(value, f"{where}/patternProperties")
            made["patternProperties"] = {whole_pattern(pattern): {} if lowered is None else lowered}
            others = False if lowered is not None else None
        rest = None if others in (None, False) else self.lower(others, f"{where}/additionalProperties")
        made["additionalProperties"] = False if rest is None else True if rest == {} else rest
        if rest is not None and names:  # by themselves they could be one of these, with an escape
            made |= {"patternProperties": {other_names(names): rest}, "additionalProperties": False}
        if patterns and others is None:
            del made["patternProperties"]
        return _with_counts(made, given, is_open=rest is not None or "patternProperties" in made, where=where)


def _patterns_of(given: Alternative, others: Any, where: str) -> dict[str, Any]:
    """Return the one pattern that all names of an object match, with the schema of their values."""
    patterns: dict[str, Any] = dict(given.get("patternProperties", {}))
    names = given.get("propertyNames", True)
    if names not in (True, {}):
        if not (isinstance(names, dict) and set(names) - _ANNOTATIONS - {"type"} == {"pattern"}):
            raise _refused(f"{where}/propertyNames", "only a pattern is supported there")
        if patterns or given.get("properties") or given.get("required"):
            raise _refused(f"{where}/propertyNames", "it is not supported beside other names")
        return {names["pattern"]: True if others is None else others}
    if not patterns:
        return {}
    if len(patterns) > 1 or given.get("properties") or given.get("required") or others not in (None, False):
        raise _refused(f"{where}/patternProperties", "only one pattern without other properties is supported")
    return patterns


def _with_counts(
    made: dict[str, Any], given: Alternative, *, is_open: bool, where: str
) -> dict[str, Any] | None:
    """Add the limits on the number of properties; names may repeat where they are not known."""
    num_named, num_required = len(made.get("properties", ())), len(made.get("required", ()))
    fewest, most = given.get("minProperties", 0), given.get("maxProperties", math.inf)
    if fewest > most or num_required > most or (not is_open and fewest > num_named):
        return None
    if fewest > max(1, num_required) and is_open:
        raise _refused(f"{where}/minProperties", "it is above 1 where names are not given")
    if fewest > num_required:
        made["minProperties"] = fewest
    if most < (math.inf if is_open else num_named):
        made["maxProperties"] = int(most)
    return made


def _emit_number(given: Alternative, where: str) -> dict[str, Any] | None:
    step = given.get("multipleOf")
    if step is not None and (step < 1 or step != int(step)):
        raise _refused(f"{where}/multipleOf", "only whole numbers of at least 1 are supported")
    kind = given["type"] if step is None else "integer"
    made: dict[str, Any] = {"type": kind}
    low, high = given.get("minimum", -math.inf), given.get("maximum", math.inf)
    above, below = given.get("exclusiveMinimum", -math.inf), given.get("exclusiveMaximum", math.inf)
    if kind == "integer":
        low = max(low if low == -math.inf else math.ceil(low), _next(above, 1))
        high = min(high if high == math.inf else math.floor(high), _next(below, -1))
        above, below = -math.inf, math.inf
        if step is not None and step > 1:
            return _emit_multiples(int(step), low, high, where)
    if low > high or ((max(low, above), min(high, below)) == (above, below) and above >= below):
        return None
    if above >= high or below <= low:
        return None
    made |= {"exclusiveMinimum": above} if above >= low and above > -math.inf else {}
    made |= {"minimum": low} if low > above else {}
    made |= {"exclusiveMaximum": below} if below <= high and below < math.inf else {}
    return made | ({"maximum": high} if high < below else {})


def _emit_multiples(step: int, low: float, high: float, where: str) -> dict[str, Any] | None:
    if low > -math.inf and high < math.inf:
        values = range(-(-int(low) // step) * step, int(high) + 1, step)
        if len(values) > _MAX_MULTIPLES:
            raise _refused(f"{where}/multipleOf", f"more than {_MAX_MULTIPLES} values are within its limits")
        return {"enum": list(values)} if values else None
    if low > -math.inf or high < math.inf or step > _MAX_STEP:
        raise _refused(
            f"{where}/multipleOf",
            f"only up to {_MAX_STEP} without limits is supported, or with both a lower and an upper one",
        )
    return {"type": "integer", "multipleOf": step}


def _next(bound: float, step: int) -> float:
    """Return the first integer beyond an exclusive bound."""
    if math.isinf(bound):
        return bound
    return math.floor(bound) + 1 if step > 0 else math.ceil(bound) - 1


def _emit_string(given: Alternative, where: str) -> dict[str, Any] | None:
    fewest, most = given.get("minLength", 0), given.get("maxLength", math.inf)
    if fewest > most:
        return None
    lengths = {"minLength": fewest} if fewest else {}
    lengths |= {} if most == math.inf else {"maxLength": most}
    kinds = [name for name in ("pattern", "format") if name in given]
    if given.get("format") in FREE_FORMATS:
        kinds.remove("format")
    if not kinds:
        return {"type": "string", **lengths}
    if len(kinds) > 1:
        raise _refused(f"{where}/pattern", "it is not supported beside format")
    beside = ""
    try:
        found = format_pattern(given["format"]) if kinds == ["format"] else whole_pattern(given["pattern"])
        if lengths:
            beside = f"it is not supported beside {' and '.join(lengths)}: "
            within = limited(found, fewest, most)
            return None if within is None else {"type": "string", "pattern": within}
    except InvalidRequestError as error:
        raise _refused(f"{where}/{kinds[0]}", f"{beside}{error}") from None
    return {"type": "string", "pattern": found}


def _typed(schema: Mapping[str, Any], where: str) -> list[Alternative]:
    """Return one alternative for each type, with the keywords of that type."""
    given = schema.get("type", None)
    kinds = list(TYPES) if given is None else given if isinstance(given, list) else [given]
    for kind in kinds:
        if kind not in TYPES:
            told = nearest(kind, TYPES) if isinstance(kind, str) else ""
            raise _refused(
                f"{where}/type", f"it is {_shown(kind)}; it must be one of {', '.join(TYPES)}.{told}"
            )
    keywords = {name: _checked(name, schema[name], where) for name in schema if name in _TYPES_OF}
    if given is None and not keywords:
        return [{}]
    found: list[Alternative] = []
    for kind in dict.fromkeys(kinds):
        if kind == "integer" and "number" in kinds:
            continue
        own = KEYWORDS.get("integer" if kind == "number" else kind, ())
        found.append({"type": kind, **{name: value for name, value in keywords.items() if name in own}})
        if "format" in keywords and kind in ("integer", "number"):
            found[-1] |= _number_format(found[-1], keywords["format"], where)
    return found


def _number_format(given: Alternative, name: str, where: str) -> Alternative:
    """Return the limits of a number with a format; those of texts do not apply to it."""
    if name not in NUMBER_FORMATS:
        try:
            format_pattern(name)
        except InvalidRequestError as error:
            if name not in FREE_FORMATS:
                raise _refused(f"{where}/format", str(error)) from None
        return {}
    low, high = NUMBER_FORMATS[name]
    limits: Alternative = {} if low == -math.inf else {"minimum": max(low, given.get("minimum", low))}
    return limits if high == math.inf else {**limits, "maximum": min(high, given.get("maximum", high))}


def _checked(name: str, value: Any, where: str) -> Any:
    """Return the value of a keyword. Raises InvalidRequestError unless it is of the keyword's type."""
    where = f"{where}/{name}"
    if name in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise _refused(where, f"it is {_shown(value)}; it must be a number of 0 or more")
        return int(value)
    kinds: dict[str, tuple[type, ...]] = {
        "pattern": (str,),
        "format": (str,),
        "required": (list,),
        "prefixItems": (list,),
        "properties": (dict,),
        "patternProperties": (dict,),
        "uniqueItems": (bool,),
    }
    if _TYPES_OF[name] == "integer":
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(where, f"it is {_shown(value)}; it must be a number")
        return value
    if name in kinds and not isinstance(value, kinds[name]):
        raise _refused(where, f"it is {_shown(value)}; it must be a {kinds[name][0].__name__}")
    if name == "required" and not all(isinstance(each, str) for each in value):
        raise _refused(where, "it must be a list of names")
    return value


def _check_names(schema: Mapping[str, Any], where: str, *, is_root: bool) -> None:
    for name in schema:
        if name in _TYPES_OF or name in _COMBINERS or name in _ANNOTATIONS or name.startswith("x-"):
            continue
        if name == "type" or (name == "$id" and is_root):
            continue
        if name in _REFUSED or name == "$id":
            raise _refused(f"{where}/{name[:64]}", "this keyword is not supported")
        raise _refused(f"{where}/{name[:64]}", f"there is no such keyword.{nearest(name[:64], _KNOWN)}")
    if "json-schema.org/" not in str(schema.get("$schema", "json-schema.org/")):
        raise _refused(f"{where}/$schema", f"{_shown(schema['$schema'])} is not a known dialect")


def _evaluated(alternative: Alternative) -> Alternative:
    """Return an alternative whose unevaluated properties and items are additional ones: all is merged."""
    found = dict(alternative)
    for unevaluated, rest in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if unevaluated in found:
            value = found.pop(unevaluated)
            found.setdefault(rest, value)
    return found


def _is_shut_out(one: Alternative, other: Alternative) -> bool:
    """Say whether `other` requires a property that `one` does not allow."""
    if one.get("additionalProperties") is not False or one.get("patternProperties"):
        return False
    return not set(other.get("required", ())) <= set(one.get("properties", ()))


def _anchored(schema: Any, name: str, where: str) -> Any:
    found = list(_with_anchor(schema, name))
    if len(found) != 1:
        raise _refused(where, f"there are {len(found)} parts with the $anchor {_shown(name)}; one is needed")
    return found[0]


def _with_anchor(schema: Any, name: str) -> Iterator[Any]:
    if isinstance(schema, dict):
        if schema.get("$anchor") == name:
            yield schema
        for each in schema.values():
            yield from _with_anchor(each, name)
    elif isinstance(schema, list):
        for each in schema:
            yield from _with_anchor(each, name)


def _refused(where: str, what: str) -> InvalidRequestError:
    place = where.removeprefix("#") or "/"
    return InvalidRequestError(f"the schema at {place[:200]}: {what}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"
