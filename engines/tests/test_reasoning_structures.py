"""What an answer must match after its reasoning, as xgrammar reads it. Needs xgrammar."""

from __future__ import annotations

import pytest

from sagellm.engines.grammar.provider import XGrammar
from sagellm.engines.parsers.structure import after_reasoning
from sagellm.engines.sampling.structured_outputs import StructuredOutputs
from sagellm.testing.grammar import KIT_VOCABULARY

pytest.importorskip("xgrammar")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
AFTER = [
    ({"json": SCHEMA}, '{"a": 5}', '{"a": 50}'),
    ({"json_object": True}, '{"b": {"c": [1]}}', "[1]"),
    ({"regex": "[0-9]{2}"}, "12", "1"),
    ({"choice": ["yes", "no"]}, "no", "not"),
    ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c"'}, "ac", "a"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "x+"}}}, "xx", "y"),
]


@pytest.fixture(scope="module")
def provider():
    made = XGrammar(KIT_VOCABULARY)
    yield made
    made.close()


def accepts(provider, asked, text):
    """Say whether a text and then its end match what was asked for."""
    state = provider.start(provider.prepare(asked.kind, asked.text))
    tokens = [*text.encode(), *sorted(KIT_VOCABULARY.stop_token_ids)]
    return provider.advance(state, tokens) == len(tokens)


@pytest.mark.parametrize(("given", "right", "wrong"), AFTER, ids=[next(iter(each[0])) for each in AFTER])
def test_what_comes_after_the_reasoning_matches(provider, given, right, wrong):
    asked = StructuredOutputs(**given)
    for tags, before in ((("<think>", "</think>"), "<think>\nI <look>.\n"), (("", "</think>"), "I look.")):
        bound = after_reasoning(asked, tags, {})
        assert accepts(provider, bound, f"{before}</think>\n\n{right}")
        assert not accepts(provider, bound, f"{before}</think>\n\n{wrong}")
        assert accepts(provider, bound, right) == bool(tags[0]), "begun reasoning has to end"
        assert not accepts(provider, bound, wrong)


@pytest.mark.parametrize("text", ["{", "[1]", '"a"'])
def test_what_describes_nothing_is_left_for_the_compiler_to_refuse(text):
    for kind in ("json", "structural_tag"):
        asked = StructuredOutputs(**{kind: text})
        assert after_reasoning(asked, ("", "</think>"), {}) is asked
