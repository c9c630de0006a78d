"""The provider xgrammar: the contract, its limits, and vocabularies. Needs xgrammar."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from sagellm.core import ConfigError, EngineError, InvalidRequestError
from sagellm.core.protocols.grammar import Vocabulary
from sagellm.core.protocols.parsers import FunctionTool
from sagellm.engines.grammar.provider import XGrammar
from sagellm.engines.grammar.vocabulary import from_bytes, to_bytes, vocabulary_of
from sagellm.engines.parsers.hermes import HermesToolParser
from sagellm.engines.parsers.llama3 import Llama3ToolParser
from sagellm.engines.parsers.mistral import MistralToolParser
from sagellm.engines.parsers.qwen3 import Qwen3ToolParser
from sagellm.testing import GrammarContract
from sagellm.testing.grammar import KIT_VOCABULARY
from sagellm.testing.patience import wait_until

pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def warm():
    """A process that all providers here share: it starts in seconds."""
    made = XGrammar(KIT_VOCABULARY, compile_s=2.0, compile_memory_mib=512)
    yield made._process
    made.close()


@pytest.fixture
def provider(warm):
    made = XGrammar(KIT_VOCABULARY)
    made._process = warm
    return made


class TestXGrammar(GrammarContract):
    @pytest.fixture(autouse=True)
    def _end(self):
        self._made = []
        yield
        for each in self._made:
            each.close()

    def make(self, vocabulary):
        self._made.append(XGrammar(vocabulary))
        return self._made[-1]


HOSTILE = {
    "many values": ("json", json.dumps({"enum": [f"value {number}" for number in range(100_000)]})),
    "many texts": ("choice", json.dumps([f"text {number}" for number in range(100_000)])),
    "many alternatives": ("json", json.dumps({"anyOf": [{"const": number} for number in range(100_000)]})),
    "deep": ("json", '{"items":' * 400 + "{}" + "}" * 400),
    "nested repeats": ("regex", "(" * 9 + "[ab]" + "{1,999}[bc])" * 9),
    "nested arrays": ("json", '{"type":"array","maxItems":5000,"items":' * 60 + "{}" + "}" * 60),
    "deep grammar": ("grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_exceeds_a_limit_is_refused_and_the_next_text_is_not_delayed(provider, name):
    provider.prepare("choice", '["warm"]')
    pid = provider._process._process.pid
    with pytest.raises(InvalidRequestError, match=r"takes more than|too deeply|combinations|exceeded"):
        provider.prepare(*HOSTILE[name])
    provider.prepare("choice", '["after"]')
    assert provider._process._process.pid == pid


def test_a_process_that_was_killed_starts_again(provider):
    provider.prepare("choice", '["before"]')
    provider._process._process.kill()
    provider._process._process.wait()
    provider.prepare("choice", '["after"]')


def test_closing_ends_what_is_compiled_and_nothing_starts_again():
    made = XGrammar(KIT_VOCABULARY)
    made.prepare("choice", '["warm"]')
    slow = json.dumps({"anyOf": [{"type": "array", "items": {"const": number}} for number in range(100_000)]})
    errors = []

    def prepare():
        try:
            made.prepare("json", slow)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    process = made._process._process
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    forks = wait_until(lambda: children.read_text().split())
    made.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], EngineError)
    assert made._process._process is None
    wait_until(lambda: not any(_runs(pid) for pid in forks))


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_texts_of_any_characters_can_be_chosen(provider):
    texts = ['quo"te', "back\\slash", "line\nend", "日本語", "😀", "[a-z]+", " "]
    compiled = provider.prepare("choice", json.dumps(texts))
    for text in texts:
        state = provider.start(compiled)
        tokens = list(text.encode())
        assert provider.advance(state, tokens) == len(tokens)
        assert provider.advance(state, sorted(KIT_VOCABULARY.stop_token_ids)) == 1


def test_white_space_is_bounded():
    for most in (0, 3):
        made = XGrammar(KIT_VOCABULARY, max_whitespace=most)
        state = made.start(made.prepare("json", '{"type":"array","items":{"type":"null"}}'))
        assert made.advance(state, list(b"[" + b" " * 9)) == 1 + most
        form = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "null"}}}
        tag = json.dumps({"type": "structural_tag", "format": form})
        state = made.start(made.prepare("structural_tag", tag))
        assert made.advance(state, list(b"[" + b" " * 9)) == 1 + most
        made.close()


def test_limits_out_of_range_are_refused():
    for options in ({"max_whitespace": -1}, {"compile_s": 0}, {"compile_memory_mib": 0}):
        with pytest.raises(ConfigError):
            XGrammar(KIT_VOCABULARY, **options)


def test_a_model_without_a_stop_token_is_told_so():
    with pytest.raises(InvalidRequestError, match="eos_token_id"):
        XGrammar(Vocabulary(tokens=[b"a"], stop_token_ids=frozenset())).prepare("json_object", "")


def test_a_vocabulary_crosses_to_the_process_as_it_is():
    again = from_bytes(to_bytes(KIT_VOCABULARY))
    assert (list(again.tokens), again.stop_token_ids) == (
        list(KIT_VOCABULARY.tokens),
        KIT_VOCABULARY.stop_token_ids,
    )


def test_the_tokens_of_a_text_are_its_bytes(make_engine):
    engine = make_engine()
    limits = engine.driver.input.limits
    made = vocabulary_of(engine.light_tokenizer, limits.vocab_size, limits.eos_token_ids)
    text = 'Größe: 12 {"a": [1, 2]} 日本'
    token_ids = engine.light_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(made.tokens[each] for each in token_ids) == text.encode()
    assert made.stop_token_ids == limits.eos_token_ids
    assert all(made.tokens[each] == b"" for each in made.stop_token_ids)
    words = np.zeros(made.num_words, np.uint32)
    assert words.size * 32 >= limits.vocab_size


BOOKING = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "seats": {"$ref": "#/$defs/seats"},
    },
    "required": ["day", "code", "seats"],
    "$defs": {"seats": {"minimum": 2, "maximum": 9, "type": ["integer", "null"]}},
}
PARSERS = {
    "hermes": (HermesToolParser(), '<tool_call>\n{"name": "book", "arguments": %s}\n</tool_call>'),
    "llama3": (Llama3ToolParser(), '{"name": "book", "parameters": %s}'),
    "mistral": (MistralToolParser(), '[TOOL_CALLS][{"name": "book", "arguments": %s}]'),
    "named": (MistralToolParser("[ARGS]"), "[TOOL_CALLS]book[ARGS]%s"),
}


def matches(provider, kind, text, answer):
    state = provider.start(provider.prepare(kind, text))
    tokens = [*answer.encode(), *KIT_VOCABULARY.stop_token_ids]
    return provider.advance(state, tokens) == len(tokens)


def forced(parser, parameters):
    tools = [FunctionTool(name="book", parameters=parameters)]
    return json.dumps(parser.structure(tools, is_required=True, is_parallel=True))


@pytest.mark.parametrize("kind", PARSERS)
def test_a_forced_call_matches_every_keyword_of_its_schema(provider, kind):
    parser, form = PARSERS[kind]
    good = {"day": "2024-02-29", "code": "AB", "seats": 2}
    structure = forced(parser, BOOKING)
    assert matches(provider, "structural_tag", structure, form % json.dumps(good))
    assert matches(provider, "structural_tag", structure, form % json.dumps({**good, "seats": None}))
    for wrong in ({"day": "2023-02-29"}, {"code": "ABC"}, {"seats": 1}, {"seats": 10}, {"seats": "2"}):
        assert not matches(provider, "structural_tag", structure, form % json.dumps({**good, **wrong}))
    assert not matches(provider, "structural_tag", structure, form % '{"day": "2024-02-29"}')


def test_a_forced_call_in_xml_matches_every_keyword_of_its_schema(provider):
    form = (
        "<tool_call>\n<function=book>\n<parameter=day>\n{day}\n</parameter>\n<parameter=code>\n{code}\n</parameter>\n"
        "<parameter=seats>\n{seats}\n</parameter>\n</function>\n</tool_call>"
    )
    structure = forced(Qwen3ToolParser(), BOOKING)
    good = {"day": "2024-02-29", "code": "AB", "seats": "2"}
    assert matches(provider, "structural_tag", structure, form.format(**good))
    for wrong in ({"day": "2023-02-29"}, {"code": "ABC"}, {"seats": "1"}, {"seats": "10"}):
        assert not matches(provider, "structural_tag", structure, form.format(**good | wrong))


@pytest.mark.parametrize("kind", [*PARSERS, "qwen3"])
def test_a_forced_call_whose_schema_cannot_be_asserted_is_refused_by_name(provider, kind):
    parser = Qwen3ToolParser() if kind == "qwen3" else PARSERS[kind][0]
    for schema in ({"format": "dayte"}, {"pattern": "(?=a)"}, {"not": {}}, {"$ref": "#/$defs/none"}):
        (keyword,) = schema
        structure = forced(parser, {"properties": {"day": {"type": "string", **schema}}})
        with pytest.raises(InvalidRequestError, match=r"^structural_tag: after .*book") as e:
            provider.prepare("structural_tag", structure)
        assert f"the schema at /properties/day/{keyword}: " in str(e.value)


def test_neither_torch_nor_transformers_is_loaded_to_compile():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from sagellm.engines.grammar.compiling import Compiler\n"
        "from sagellm.testing.grammar import KIT_VOCABULARY\n"
        "compiler = Compiler(KIT_VOCABULARY, max_whitespace=8, additional_properties=False)\n"
        "assert compiler.compile('json', '{\"type\": \"null\"}', 1e9)\n"
        "assert 'transformers' not in sys.modules\n"
        "del sys.modules['torch']\n"
        "import xgrammar\n"
        "assert xgrammar.GrammarCompiler.__module__ == 'xgrammar.compiler', 'others find all of it'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_engine_without_torch_does_without_it_for_grammars():
    code = (
        "import sys\n"
        "from sagellm.engines import LLMEngine, SamplingParams\n"
        "from sagellm.engines.sampling.structured_outputs import StructuredOutputs\n"
        "if __name__ == '__main__':\n"
        "    with LLMEngine(model='embedded') as engine:\n"
        "        had_torch = 'torch' in sys.modules  # of a machine where native does not run\n"
        "        structure = StructuredOutputs(choice=['yes', 'no'])\n"
        "        params = SamplingParams(max_tokens=4, structured_outputs=structure)\n"
        "        assert engine.generate('Well?', params)[0].outputs[0].text in ('yes', 'no')\n"
        "    assert had_torch or 'torch' not in sys.modules\n"
        "    import torch\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"properties": {"a": {"type": "integer"}, "ab": {}}, "additionalProperties": {"type": "null"}},
            ['{"a":1,"ab":2,"abc":null}', '{"b":null}', '{"":null,"b":null}', '{"aa":null}', '{"ü😀":null}'],
            ['{"a":1,"\\u0061":null}', '{"a":1,"a":null}', '{"\\u0061":null}', '{"ab":2,"a\\u0062":null}'],
        ),
        (
            {"properties": {'q"': {"type": "integer"}, "no": False}, "additionalProperties": True},
            ['{"q\\"":1,"b":"x"}', '{"b":{"\\u0061":1}}', "{}"],
            ['{"q\\"":1,"q\\"":"x"}', '{"q\\u0022":"x"}', '{"no":1}', '{"n\\u006f":1}'],
        ),
        (
            {"properties": {"a": {"type": "integer"}}, "required": ["a", "ä b"], "additionalProperties": {}},
            ['{"a":1,"ä b":1}', '{"a":1,"ä b":1,"ä":2,"a b":3}'],
            ['{"a":1}', '{"a":1,"ä b":1,"a":"x"}', '{"a":1,"ä b":1,"\\u00e4 b":3}'],
        ),
        ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}'], ['{"a":1,"a":1}', '{"\\u0061":1}']),
    ],
)
def test_a_property_that_is_named_cannot_come_twice(provider, schema, valid, invalid):
    text = json.dumps({"type": "object", **schema})
    for answer in valid:
        assert matches(provider, "json", text, answer), answer
    for answer in invalid:
        assert not matches(provider, "json", text, answer), answer


def test_multiples_are_multiples(provider):
    for number in [*range(-40, 41), 700, -49, 10**12, 7 * 10**12 + 7, -(10**9)]:
        schema = '{"type":["number","null"],"multipleOf":7}'
        assert matches(provider, "json", schema, str(number)) == (number % 7 == 0), number


def test_patterns_and_formats_have_nothing_that_ends_their_text(provider):
    patterns = ({"pattern": each} for each in ("^[^a]$", "^[^ä]$", "^.$"))
    for schema in (*patterns, {"format": "json-pointer"}):
        text = json.dumps({"type": "string", **schema})
        assert matches(provider, "json", text, '"/"')
        for wrong in ('"""', '"\\"', '"/"a"', '"/\\a"', '"\n"'):
            assert not matches(provider, "json", text, wrong), (schema, wrong)


def test_lengths_beside_a_pattern_are_asserted(provider):
    text = json.dumps({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4})
    for length in range(7):
        assert matches(provider, "json", text, f'"{"x" * length}"') == (2 <= length <= 4)


@pytest.mark.parametrize("bits", [8, 32, 64])
def test_numbers_are_within_the_limits_of_their_format(provider, bits):
    schema = json.dumps({"type": "integer", "format": f"int{bits}"})
    most = 2 ** (bits - 1)
    for number in (0, 1, -1, most - 1, -most, most // 3):
        assert matches(provider, "json", schema, str(number)), number
    for number in (most, -most - 1, 7 * most):
        assert not matches(provider, "json", schema, str(number)), number


@pytest.mark.parametrize(
    "pattern", [r"^[^\w]$", r"^[^\d-]$", r"^\W$", r"^\D$", r"^\S$", r"^[^\s]$", "^[^ä]$", "^.$"]
)
def test_sets_of_other_characters_are_those_of_every_reader(provider, pattern):
    text = json.dumps({"type": "string", "pattern": pattern})
    accepted = [
        each for each in 'aZ0_-+ äé٣\u00a0\u3000😀"\\\n\t\x01' if matches(provider, "json", text, f'"{each}"')
    ]
    assert accepted
    for each in accepted:
        assert json.loads(f'"{each}"') == each
        assert re.search(pattern, each)
        assert re.search(pattern, each, re.ASCII) or "s" in pattern.lower()
