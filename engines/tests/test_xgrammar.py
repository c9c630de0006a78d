"""The provider xgrammar: the contract, its limits, and vocabularies. Needs xgrammar."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from sagellm.core import ConfigError, EngineError, InvalidRequestError
from sagellm.core.protocols.grammar import Vocabulary
from sagellm.engines.grammar.compile_process import CompileLimits, CompileProcess
from sagellm.engines.grammar.provider import XGrammar
from sagellm.engines.grammar.vocabulary import from_bytes, to_bytes, vocabulary_of
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
    def _warm(self, warm: CompileProcess) -> None:
        self._process = warm

    def make(self, vocabulary):
        made = XGrammar(vocabulary)
        made._process = self._process
        return made


HOSTILE = {
    "many values": ("json", json.dumps({"enum": [f"value {number}" for number in range(100_000)]})),
    "many texts": ("choice", json.dumps([f"text {number}" for number in range(100_000)])),
    "many alternatives": ("json", json.dumps({"anyOf": [{"const": number} for number in range(100_000)]})),
    "deep": ("json", '{"items":' * 400 + "{}" + "}" * 400),
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


def test_closing_it_ends_a_compilation_and_starts_no_process_again():
    made = CompileProcess(KIT_VOCABULARY, CompileLimits(), max_whitespace=8, additional_properties=False)
    errors = []

    def prepare():
        try:
            made.compile("choice", '["a"]')
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    wait_until(lambda: made._process is not None)
    process = made._process
    made.close()
    thread.join(60)
    assert process.returncode is not None
    assert (made._process, len(errors)) == (None, 1)


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
