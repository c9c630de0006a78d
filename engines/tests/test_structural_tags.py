"""The schemas within structural tags are rewritten or refused like those of whole answers."""

from __future__ import annotations

import json

import pytest

from sagellm.core import InvalidRequestError
from sagellm.core.protocols.parsers import FunctionTool
from sagellm.engines.grammar.json_schema import lowered_schema
from sagellm.engines.grammar.structural_tags import lowered_tags
from sagellm.engines.parsers.hermes import HermesToolParser
from sagellm.engines.parsers.llama3 import Llama3ToolParser
from sagellm.engines.parsers.mistral import MistralToolParser
from sagellm.engines.parsers.qwen3 import Qwen3ToolParser
from sagellm.engines.parsers.structure import after, with_tokens

PARSERS = [HermesToolParser(), Llama3ToolParser(), MistralToolParser(), MistralToolParser("[ARGS]")]
TAGS = {"<tool_call>": 1000, "</tool_call>": 1001}


def low(structure, *, additional_properties=False, max_whitespace=8):
    text = json.dumps(structure)
    return json.loads(
        lowered_tags(text, additional_properties=additional_properties, max_whitespace=max_whitespace)
    )


def schemas_in(part):
    if isinstance(part, dict):
        if "json_schema" in part:
            return [part["json_schema"]]
        part = list(part.values())
    return [found for each in part for found in schemas_in(each)] if isinstance(part, list) else []


def calls_of(parser, parameters, *, is_required=True):
    tools = [
        FunctionTool(name="fine", parameters={"type": "object"}),
        FunctionTool(name="book", parameters=parameters),
    ]
    return parser.structure(tools, is_required=is_required, is_parallel=True)


@pytest.mark.parametrize("parser", [*PARSERS, Qwen3ToolParser()])
def test_the_parameters_of_forced_calls_are_rewritten(parser):
    parameters = {
        "type": "object",
        "properties": {"day": {"$ref": "#/$defs/day"}, "seats": {"minimum": 1.5, "type": "integer"}},
        "required": ["day"],
        "$defs": {"day": {"type": "string", "format": "date", "title": "Day"}},
    }
    found = schemas_in(low(calls_of(parser, parameters)))
    assert found == [lowered_schema({"type": "object"}), lowered_schema(parameters)]
    assert found[1]["properties"]["seats"] == {"type": "integer", "minimum": 2}
    assert "pattern" in json.dumps(found[1])
    assert "format" not in json.dumps(found[1])


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("bind", [lambda each: each, lambda each: with_tokens(each, TAGS)])
@pytest.mark.parametrize("reasoned", [False, True])
def test_what_cannot_be_asserted_is_refused_with_the_name_of_the_tool(parser, bind, reasoned):
    structure = bind(calls_of(parser, {"properties": {"day": {"type": "string", "format": "dayte"}}}))
    if reasoned:
        structure = after(structure, ("<think>", "</think>"), {}, is_optional=False)
    with pytest.raises(InvalidRequestError) as error:
        low(structure)
    assert "book" in str(error.value)
    assert "the schema at /properties/day/format: the format 'dayte' is not supported" in str(error.value)


def test_free_arguments_stay_any_object():
    (first, second) = schemas_in(low(calls_of(PARSERS[0], {"not": {}}, is_required=False)))
    assert first == second == {"type": "object", "additionalProperties": True}


def test_options_of_the_provider_hold_within_tags():
    structure = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {}}}}
    assert low(structure)["max_whitespace_cnt"] == 8
    assert low(structure, max_whitespace=2)["max_whitespace_cnt"] == 2
    assert low({**structure, "max_whitespace_cnt": 1}, max_whitespace=2)["max_whitespace_cnt"] == 1
    assert low({**structure, "max_whitespace_cnt": 9}, max_whitespace=2)["max_whitespace_cnt"] == 2
    opened = low(structure, additional_properties=True)["json_schema"]["patternProperties"]
    assert list(opened.values()) == [{}]


@pytest.mark.parametrize("option", [{"any_order": True}, {"excludes": ["<"]}])
def test_options_that_weaken_a_schema_are_refused(option):
    structure = {"type": "json_schema", "json_schema": {"type": "object"}, **option}
    with pytest.raises(InvalidRequestError, match=f"{next(iter(option))} is not supported"):
        low(structure)


def test_other_parts_are_as_they_were():
    structure = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "regex", "pattern": "[0-9]+"},
                {"type": "dispatch", "rules": [["<a>", {"type": "any_text"}]], "loop": True},
            ],
        },
    }
    assert low(structure) == structure


def test_what_is_not_json_or_too_deep_is_refused():
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        lowered_tags("{", additional_properties=False, max_whitespace=8)
    deep = '{"content":' * 900 + "{}" + "}" * 900
    with pytest.raises(InvalidRequestError, match=r"too deeply|not valid JSON"):
        lowered_tags(deep, additional_properties=False, max_whitespace=8)
