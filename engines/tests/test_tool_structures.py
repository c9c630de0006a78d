"""What answers that must be calls match: what each tool parser reads, and nothing else."""

import json

import pytest

from sagellm.core.protocols.parsers import FunctionTool
from sagellm.engines.parsers.answers import Answer
from sagellm.engines.parsers.hermes import HermesToolParser
from sagellm.engines.parsers.llama3 import Llama3ToolParser
from sagellm.engines.parsers.mistral import MistralToolParser
from sagellm.engines.parsers.qwen3 import Qwen3ToolParser
from sagellm.engines.parsers.structure import after, with_tokens
from sagellm.testing.parsers import read

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    FunctionTool(name="weather", parameters=SCHEMA),
    FunctionTool(name="rain", parameters=SCHEMA, is_strict=True),
]
FORMATS = {
    "hermes": (
        HermesToolParser(),
        '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "\n",
    ),
    "qwen3": (
        Qwen3ToolParser(),
        "<tool_call>\n<function={name}>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
    "llama3": (Llama3ToolParser(), '{{"name": "{name}", "parameters": {arguments}}}', "; "),
    "mistral": (MistralToolParser(), '{{"name": "{name}", "arguments": {arguments}}}', ", "),
    "named": (MistralToolParser("[ARGS]"), "[TOOL_CALLS]{name}[ARGS]{arguments}", ""),
}
ID, END_ID = 1000, 1001


def call(kind, name="weather", city="Paris", **more):
    parts = {"name": name, "city": city, "arguments": json.dumps({"city": city, **more})}
    return FORMATS[kind][1].format(**parts)


def answer(kind, *calls):
    text = FORMATS[kind][2].join(calls)
    return f"[TOOL_CALLS][{text}]" if kind == "mistral" else text


@pytest.fixture(scope="module")
def matches():
    """Say whether a text of bytes and special tokens matches a structural tag."""
    xgrammar = pytest.importorskip("xgrammar")
    special = {ID: b"\xff<tool_call>", END_ID: b"\xff</tool_call>"}
    tokens = [special.get(index, bytes([index]) if index < 256 else b"") for index in range(1003)]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=1003, stop_token_ids=[1002])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def check(structure, *pieces):
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(structure)))
        token_ids = [
            each for piece in pieces for each in ([piece] if isinstance(piece, int) else piece.encode())
        ]
        return all(map(matcher.accept_token, [*token_ids, 1002]))

    return check


@pytest.mark.parametrize("kind", FORMATS)
def test_required_calls_are_what_the_parser_reads(matches, kind):
    parser = FORMATS[kind][0]
    many = parser.structure(TOOLS, is_required=True, is_parallel=True)
    one = parser.structure(TOOLS, is_required=True, is_parallel=False)
    single = answer(kind, call(kind, city='a "b" }\\'.replace('"', "'")))
    pair = answer(kind, call(kind), call(kind, "rain", "Rom"))
    assert matches(many, single)
    assert matches(many, pair)
    assert matches(one, single)
    assert not matches(one, pair)
    for structure in (many, one):
        assert not matches(structure, "Hello")
        assert not matches(structure, "")
        assert not matches(structure, answer(kind, call(kind, "other")))
    found = Answer.of(read(parser.start(TOOLS), pair))
    assert [each.name for each in found.tool_calls] == ["weather", "rain"]
    assert found.content == ""


@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral", "named"])
def test_required_arguments_match_the_schema(matches, kind):
    structure = FORMATS[kind][0].structure(TOOLS, is_required=True, is_parallel=True)
    assert matches(structure, answer(kind, call(kind, days=3)))
    assert not matches(structure, answer(kind, call(kind, days="3")))
    assert not matches(structure, answer(kind, call(kind, more=3)))


def test_a_function_without_parameters_gets_none(matches):
    structure = HermesToolParser().structure(
        [FunctionTool(name="weather")], is_required=True, is_parallel=True
    )
    assert matches(structure, '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    assert not matches(structure, call("hermes"))


def test_arguments_are_an_object_even_if_the_schema_does_not_say_so(matches):
    tool = FunctionTool(name="weather", parameters={"properties": {"city": {"type": "string"}}})
    structure = HermesToolParser().structure([tool], is_required=True, is_parallel=True)
    assert matches(structure, call("hermes"))
    for wrong in ("3", "[]", '"a"', "null", '{"city": ' + " " * 9 + '"a"}'):
        assert not matches(structure, call("hermes").replace('{"city": "Paris"}', wrong))


@pytest.mark.parametrize("kind", FORMATS)
def test_free_answers_are_any_text_with_complete_calls(matches, kind):
    structure = FORMATS[kind][0].structure(TOOLS, is_required=False, is_parallel=True)
    assert matches(structure, "Hello, {} and <b>.")
    assert matches(structure, answer(kind, call(kind)))
    assert not matches(structure, answer(kind, call(kind))[:-4])
    assert not matches(structure, answer(kind, call(kind, "other")))


@pytest.mark.parametrize("kind", ["hermes", "named"])
def test_free_arguments_match_the_schema_of_strict_tools_alone(matches, kind):
    structure = FORMATS[kind][0].structure(TOOLS, is_required=False, is_parallel=True)
    assert matches(structure, answer(kind, call(kind, days="3")))
    assert not matches(structure, answer(kind, call(kind, "rain", days="3")))


@pytest.mark.parametrize("is_required", [True, False])
def test_tags_that_are_special_tokens_are_named_by_their_ids(matches, is_required):
    structure = HermesToolParser().structure(TOOLS, is_required=is_required, is_parallel=True)
    bound = with_tokens(structure, {"<tool_call>": ID, "</tool_call>": END_ID})
    body = call("hermes").removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert matches(bound, ID, body, END_ID)
    assert not matches(bound, ID, body)
    assert not matches(bound, ID, "Hello")
    assert matches(bound, call("hermes")) != is_required, "spelt out it is text"


def test_calls_come_after_reasoning(matches):
    structure = HermesToolParser().structure(TOOLS, is_required=True, is_parallel=True)
    thinking = "<think>\nI call.\n</think>\n\n"
    whole = after(structure, ("<think>", "</think>"), {}, is_optional=False)
    assert matches(whole, thinking + call("hermes"))
    assert not matches(whole, call("hermes"))
    begun = after(structure, ("", "</think>"), {}, is_optional=False)
    assert matches(begun, "I call.\n</think>\n\n" + call("hermes"))
    assert not matches(begun, "I call.\n</think>\n\nHello")
    free = HermesToolParser().structure(TOOLS, is_required=False, is_parallel=True)
    either = after(free, ("<think>", "</think>"), {}, is_optional=True)
    assert matches(either, thinking + "Hello")
    assert matches(either, "Hello " + call("hermes"))
    assert matches(either, "<think>\nA <tool_call> is next.\n</think>\n\n" + call("hermes"))
