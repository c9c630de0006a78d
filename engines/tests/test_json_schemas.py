"""JSON schemas are rewritten to what the compiler asserts, or refused by name."""

from __future__ import annotations

import itertools
import json
import math
import random
import re

import pytest

from sagellm.core import InvalidRequestError
from sagellm.engines.grammar.json_patterns import (
    FORMATS,
    format_pattern,
    limited,
    other_names,
    whole_pattern,
)
from sagellm.engines.grammar.json_schema import lowered

OBJECT = {"type": "object"}


def low(schema, **options):
    return json.loads(lowered(json.dumps(schema), **options))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "maxLength": 3}, {"type": "string", "maxLength": 3}),
        (
            {"type": ["integer", "null"], "minimum": 0.5},
            [{"type": "integer", "minimum": 1}, {"type": "null"}],
        ),
        ({"type": "integer", "exclusiveMaximum": 3.5}, {"type": "integer", "maximum": 3}),
        ({"const": 1, "type": "integer"}, {"enum": [1]}),
        (
            {"type": "number", "multipleOf": 5, "exclusiveMinimum": -5, "maximum": 12.5},
            {"enum": [0, 5, 10]},
        ),
        ({"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 3}),
        ({"type": "number", "multipleOf": 1}, {"type": "integer"}),
        ({"type": "integer", "format": "int32", "minimum": 0}, {"minimum": 0, "maximum": 2**31 - 1}),
        ({"type": "integer", "format": "int64"}, {"minimum": -(2**63), "maximum": 2**63 - 1}),
        ({"type": "number", "format": "double", "maximum": 2.5}, {"type": "number", "maximum": 2.5}),
        ({"type": "integer", "format": "date"}, {"type": "integer", "maximum": None}),
        ({"enum": ["a", 1, True, 2.5], "type": ["integer", "boolean"]}, [{"enum": [1]}, {"enum": [True]}]),
        ({"enum": ["a", "abc"], "maxLength": 1}, {"enum": ["a"]}),
        ({"allOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"}, {"minimum": 3, "maximum": 5}),
        ({"anyOf": [{"minimum": 3}, {"maxLength": 2}], "type": "string"}, [{}, {"maxLength": 2}]),
        ({"type": "object"}, {"additionalProperties": True}),
        ({"type": "object", "required": ["a"]}, {"properties": {"a": {}}, "additionalProperties": False}),
        (
            {
                "allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"type": "integer"}}}],
                **OBJECT,
            },
            {"properties": {"a": {"type": "integer", "minimum": 1}}},
        ),
        (
            {"properties": {"a": True, "b": False}, "type": "object", "unevaluatedProperties": True},
            {"properties": {"a": {}}, "additionalProperties": False},
        ),
        (
            {"type": "array", "prefixItems": [{"type": "null"}, {}], "maxItems": 1},
            {"prefixItems": [{"type": "null"}], "items": False, "maxItems": 1},
        ),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, [{"type": "string"}, {"type": "null"}]),
        ({"type": "string", "title": "t", "x-order": 3, "default": "a"}, {"type": "string"}),
    ],
)
def test_a_schema_becomes_alternatives_of_one_type_each(schema, expected):
    found = low(schema)
    if isinstance(expected, list) and len(expected) > 1:
        assert len(found["anyOf"]) == len(expected)
        pairs = zip(found["anyOf"], expected, strict=True)
    else:
        pairs = [(found, expected[0] if isinstance(expected, list) else expected)]
    for one, wanted in pairs:
        assert {name: one.get(name) for name in wanted} == wanted


def test_objects_may_be_left_open():
    schema = {"type": "object", "properties": {"a": {}}}
    assert low(schema)["additionalProperties"] is False
    others = low(schema, additional_properties=True)["patternProperties"]
    assert list(others.values()) == [{}]
    given = {**schema, "additionalProperties": {"type": "integer"}}
    assert list(low(given)["patternProperties"].values()) == [{"type": "integer"}]


def test_other_names_are_all_but_these():
    names = ["a", "ab", "abc", "c^", "-]", "[(", "", 'x"y', "cb\tb"]
    pattern = re.compile(other_names(names))
    for length in range(4):
        for text in map("".join, itertools.product("abc^-](x", repeat=length)):
            assert bool(pattern.fullmatch(text)) == (text not in names), text
    assert not pattern.fullmatch("[(")
    assert re.fullmatch(other_names(["a"]), "")


def test_references_are_followed_by_pointer_and_anchor_also_to_themselves():
    schema = {
        "$ref": "#/$defs/a~1b",
        "$defs": {
            "a/b": {"type": "array", "items": {"$ref": "#tree"}},
            "tree": {
                "$anchor": "tree",
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/tree"}, "leaf": {"type": "null"}},
            },
        },
    }
    found = low(schema)
    assert found["$ref"] == "#/$defs/d0"
    assert found["$defs"]["d0"] == {"type": "array", "items": {"$ref": "#/$defs/d1"}}
    tree = found["$defs"]["d1"]["properties"]
    assert found["$defs"][tree["next"]["$ref"].removeprefix("#/$defs/")]["properties"] == tree
    beside = {"$ref": "#/$defs/n", "maximum": 3, "$defs": {"n": {"type": "integer", "minimum": 1}}}
    assert low(beside) == {"type": "integer", "minimum": 1, "maximum": 3}


@pytest.mark.parametrize(
    ("schema", "where", "told"),
    [
        ({"not": {}}, "/not", "not supported"),
        ({"properties": {"a": {"if": {}}}}, "/properties/a/if", "not supported"),
        ({"dependentRequired": {}}, "/dependentRequired", "not supported"),
        ({"contains": {}}, "/contains", "not supported"),
        ({"$dynamicRef": "#a"}, "/$dynamicRef", "not supported"),
        ({"requierd": ["a"]}, "/requierd", "Did you mean 'required'?"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems", "not compared"),
        ({"type": "number", "multipleOf": 0.5}, "/multipleOf", "whole numbers"),
        ({"type": "integer", "multipleOf": 0}, "/multipleOf", "whole numbers"),
        ({"type": "integer", "multipleOf": 2, "minimum": 0}, "/multipleOf", "both"),
        (
            {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 9e9},
            "/multipleOf",
            "more than 1000 values",
        ),
        ({"type": "strng"}, "/type", "Did you mean 'string'?"),
        ({"type": "string", "format": "dat"}, "/format", "Did you mean 'date'?"),
        ({"type": "string", "format": "int32"}, "/format", "one of numbers"),
        ({"type": "integer", "format": "int31"}, "/format", "Did you mean 'int32'?"),
        ({"type": "string", "pattern": "a(?=b)"}, "/pattern", "group that begins with (?"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "/pattern", "beside maxLength"),
        ({"oneOf": [{"minimum": 1}, {"type": "integer"}]}, "/oneOf", "may both match"),
        ({"$ref": "http://a/b"}, "/$ref", "within the schema"),
        ({"$ref": "#/$defs/a"}, "/$ref", "there is no"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "/", "no value matches"),
        ({"type": "object", "minProperties": 2, "additionalProperties": {}}, "/minProperties", "above 1"),
        (
            {"$ref": "#/$defs/a", "maximum": 1, "$defs": {"a": {"$ref": "#/$defs/a", "minimum": 1}}},
            "",
            "itself",
        ),
        ({"type": "string", "maxLength": -1}, "/maxLength", "0 or more"),
        ({"properties": []}, "/properties", "must be a dict"),
        ({"$schema": "https://example.com/mine"}, "/$schema", "not a known dialect"),
        ([], "/", "must be an object"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused_by_name(schema, where, told):
    with pytest.raises(InvalidRequestError) as error:
        low(schema)
    assert f"the schema at {where}" in str(error.value)
    assert told in str(error.value)


def test_one_of_is_accepted_where_a_property_tells_its_parts_apart():
    def tagged(kind, value):
        properties = {"kind": {"const": kind}, "value": value}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    parts = [tagged("a", {"type": "string"}), tagged("b", {"type": "integer"})]
    assert len(low({"oneOf": parts})["anyOf"]) == 2
    with pytest.raises(InvalidRequestError, match="parts 0 and 2 may both match"):
        low({"oneOf": [*parts, tagged("a", {})]})


def test_what_is_not_json_or_too_deep_is_refused():
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        lowered("{")
    deep = '{"items":' * 900 + "{}" + "}" * 900
    with pytest.raises(InvalidRequestError, match="too deeply"):
        lowered(deep)
    wide = {"allOf": [{"anyOf": [{"minimum": low, "type": "integer"} for low in range(30)]}] * 4}
    with pytest.raises(InvalidRequestError, match="more than 4096 combinations"):
        low(wide)


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"],
        ),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "12:00:00", "12:60:00Z"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2024-02-29 12:00:00Z", "2023-02-29T12:00:00Z"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", ""]),
        ("ipv4", ["0.0.0.0", "255.1.19.200"], ["256.0.0.0", "1.2.3", "01.2.3.4"]),
        ("ipv6", ["::1", "1:2:3:4:5:6:7:8", "fe80::1:2"], ["1::2::3", "12345::", "1:2:3"]),
        ("email", ["joe@example.com"], ["joe", "@a", "a@b@c"]),
        ("hostname", ["a.b-c.de"], ["-a", "a-.b", "a..b", "ab--c", ""]),
        ("duration", ["P4DT12H30M5S", "PT1H", "P2W"], ["P", "PT", "P1D2H", "P2W1D"]),
        ("uri", ["https://example.com/a"], ["example.com", "http://", "//a"]),
        ("json-pointer", ["", "/a~0b/c"], ["a", "/a~"]),
        ("relative-json-pointer", ["0", "1/a~1b", "2#"], ["", "01", "/a", "1#/a", "-1"]),
        ("byte", ["", "YQ==", "YWI=", "YWJj"], ["YQ", "YQ=", "=", "YW Jj"]),
    ],
)
def test_formats_allow_texts_of_the_format_alone(name, valid, invalid):
    pattern = re.compile(format_pattern(name))
    assert all(pattern.fullmatch(each) for each in valid)
    assert not any(pattern.fullmatch(each) for each in invalid)


def test_every_format_is_tested_above():
    (parameters,) = (
        mark.args[1]
        for mark in test_formats_allow_texts_of_the_format_alone.pytestmark
        if mark.name == "parametrize"
    )
    assert {name for name, *_ in parameters} == set(FORMATS)


@pytest.mark.parametrize(
    "pattern",
    ["a", "^a", "a$", "^a$", "^a|b$", "a|b|^c", r"\d+", "[^a]b", "(?:a|b)?c", "a{2,3}", r"\.", "^(ab*)?$"],
)
def test_a_whole_pattern_matches_what_contains_a_match(pattern):
    whole = re.compile(whole_pattern(pattern))
    for length in range(5):
        for text in map("".join, itertools.product("abc1.", repeat=length)):
            assert bool(whole.fullmatch(text)) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        "(?!a)b",
        "(?P<n>a)",
        r"(a)\1",
        r"\bfoo",
        r"\p{L}",
        "a^b",
        "a$b",
        "(^a)",
        'a"b',
        r"a\\b",
        '["]',
        "(a",
        r"\n",
    ],
)
def test_patterns_that_would_mean_something_else_are_refused(pattern):
    with pytest.raises(InvalidRequestError, match="the pattern "):
        whole_pattern(pattern)


def test_patterns_mean_the_same_to_the_compiler():
    """Random patterns over three letters, against Python's own matching."""
    xgrammar = pytest.importorskip("xgrammar")
    tokens = [bytes([each]) for each in range(256)]
    info = xgrammar.TokenizerInfo([*tokens, b""], vocab_size=257, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    chance = random.Random(7)
    texts = ["".join(each) for length in range(4) for each in itertools.product("abc", repeat=length)]
    for _ in range(150):
        pattern = chance.choice(["", "^"]) + _alternatives(chance, 2) + chance.choice(["", "$"])
        schema = json.dumps({"type": "string", "pattern": whole_pattern(pattern)})
        compiled = compiler.compile_json_schema(schema)
        for text in texts:
            matcher = xgrammar.GrammarMatcher(compiled)
            is_accepted = all(map(matcher.accept_token, f'"{text}"'.encode())) and matcher.is_completed()
            assert is_accepted == bool(re.search(pattern, text)), (pattern, text)


def _alternatives(chance, depth):
    def atom():
        if depth == 0 or chance.random() < 0.7:
            return chance.choice(["a", "b", "c", "[ab]", "[^a]", r"\w", "."])
        return chance.choice(["(", "(?:"]) + _alternatives(chance, depth - 1) + ")"

    def sequence():
        repeats = ["", "", "*", "+", "?", "{2}", "{1,2}", "*?", "??"]
        return "".join(atom() + chance.choice(repeats) for _ in range(chance.randint(1, 3)))

    return "|".join(sequence() for _ in range(chance.choice([1, 1, 2])))


@pytest.mark.parametrize(
    ("pattern", "fewest", "most", "expected"),
    [
        ("^[a-z]+$", 2, 5, "[a-z]{2,5}"),
        ("^[a-z]*$", 3, math.inf, "[a-z]{3,}"),
        (r"^id-\d+\.$", 0, 8, r"id-\d{1,4}\."),
        ("^[A-Z]{2}-[0-9]{3}$", 1, 10, "[A-Z]{2}-[0-9]{3}"),
        ("^(red|green|blue)?$", 0, 5, "(red|green|blue){0,1}"),
        ("^a{2,9}?b$", 0, 5, "a{2,4}b"),
        ("a", 1, math.inf, ".*a.*"),
        ("^[a-z]+$", 0, 0, None),
        ("^abc$", 4, 9, None),
    ],
)
def test_lengths_are_written_into_patterns(pattern, fewest, most, expected):
    assert limited(whole_pattern(pattern), fewest, most) == expected
    schema = {"type": "string", "pattern": pattern, "minLength": fewest}
    schema |= {} if most == math.inf else {"maxLength": most}
    if expected is not None:
        assert low(schema) == {"type": "string", "pattern": expected}


@pytest.mark.parametrize("pattern", ["^a+b+$", "^(ab)+$", "a", "^a+$|b"])
def test_lengths_that_several_repeats_make_up_are_refused(pattern):
    with pytest.raises(InvalidRequestError, match=r"beside maxLength: .* one repeat"):
        low({"type": "string", "pattern": pattern, "maxLength": 5})


def test_limited_patterns_match_what_both_allow():
    chance = random.Random(3)
    texts = ["".join(each) for length in range(5) for each in itertools.product("abc", repeat=length)]
    num_limited = 0
    for _ in range(600):
        pattern = f"^{_alternatives(chance, 1)}$"
        fewest, most = chance.choice([0, 1, 2]), chance.choice([2, 3, math.inf])
        try:
            whole = limited(whole_pattern(pattern), fewest, most)
        except InvalidRequestError:
            continue
        num_limited += 1
        for text in texts:
            is_valid = re.search(pattern, text) is not None and fewest <= len(text) <= most
            found = whole is not None and re.fullmatch(whole, text) is not None
            assert found == is_valid, (pattern, fewest, most, text)
    assert num_limited > 200


def test_formats_have_lengths_and_some_are_of_any_text():
    assert low({"type": "string", "format": "email", "maxLength": 320})["pattern"] == format_pattern("email")
    with pytest.raises(InvalidRequestError, match="/format: it is not supported beside maxLength"):
        low({"type": "string", "format": "email", "maxLength": 20})
    assert low({"type": "string", "format": "password", "minLength": 8}) == {"type": "string", "minLength": 8}
    both = {"type": "string", "format": "path", "pattern": "^a$"}
    assert low(both) == {"type": "string", "pattern": "a"}
