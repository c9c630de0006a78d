"""What single tokens add to a text, chosen ones and others in their place, for each kind of decoder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from sagellm.engines.testing.decoders import TOKENIZERS, byte_ids, llama_style
from sagellm.engines.text.detokenizer import (
    NO_TEXT,
    REPLACEMENT,
    Decoder,
    TokenText,
    TokenwiseDetokenizer,
    decoder_of,
)

WORDS = [
    "🌊",
    " port",
    "a",
    "é",
    "あ",
    "👩🏾\u200d🚀",
    "e\u0301",
    " the",
    "\x07",
    "  ",
    "\ufffd",
    "fox ",
    "船は",
]
BYTES = st.lists(st.sampled_from(b"\xe2\x82\xac\xf0\x9f\x98\x80\xff\x41\xc3\x20"), max_size=40).map(bytes)
NAMES = pytest.mark.parametrize("name", TOKENIZERS)
WITH_BYTES = pytest.mark.parametrize("name", ["byte_level", "metaspace", "llama_style"])


def read(decoder, ids):
    """The text of tokens, and what each of them adds."""
    detokenizer = TokenwiseDetokenizer(decoder)
    text, texts = "", []
    for token_id in ids:
        text += detokenizer.append([token_id])
        texts += detokenizer.settled()
    text += detokenizer.finish()
    return text, [*texts, *detokenizer.settled()]


def joined(texts):
    return "".join(each.text for each in texts if each.raw)


def some_ids(tokenizer, seeds):
    # Some are beyond the vocabulary, as models have more rows than their tokenizer has tokens.
    return [seed % (tokenizer.get_vocab_size() + 5) for seed in seeds]


def spelled(name, *tokens):
    return [TOKENIZERS[name]().token_to_id(token) for token in tokens]


def test_tokens_keep_their_leading_spaces():
    ids = spelled("llama_style", "▁", "a", "b", "▁", "a", "b", "▁", "b")
    text, texts = read(decoder_of(llama_style(), skip_special_tokens=True), ids)
    assert text == "ab ab b"
    assert [each.text for each in texts] == ["", "a", "b", " ", "a", "b", " ", "b"]


@WITH_BYTES
def test_a_character_over_several_tokens_belongs_to_the_last(name):
    tokenizer = TOKENIZERS[name]()
    ids = byte_ids(tokenizer, "a🌊é".encode())[1:]
    text, texts = read(decoder_of(tokenizer, skip_special_tokens=True), ids)
    assert text == "🌊é"
    assert [each.text for each in texts] == ["", "", "", "🌊", "", "é"]
    assert [each.raw for each in texts] == [bytes([byte]) for byte in "🌊é".encode()]


@WITH_BYTES
def test_malformed_bytes_are_the_tokens_own_and_their_text_is_replaced(name):
    tokenizer = TOKENIZERS[name]()
    data = b"\xf0\x9f\xffA\xe2\x82"
    text, texts = read(decoder_of(tokenizer, skip_special_tokens=True), byte_ids(tokenizer, data))
    assert b"".join(each.raw for each in texts) == data
    assert joined(texts) == text == tokenizer.decode(byte_ids(tokenizer, data))
    if name == "byte_level":  # the text is that of the bytes; of byte tokens, each is replaced
        assert [each.text for each in texts] == ["", REPLACEMENT, REPLACEMENT, "A", "", REPLACEMENT]
    else:
        assert [each.text for each in texts] == [REPLACEMENT] * 6


@NAMES
@settings(max_examples=150, deadline=None)
@given(seeds=st.lists(st.integers(0, 10**6), max_size=40), skip=st.booleans())
def test_texts_of_any_tokens_joined_are_the_text(name, seeds, skip):
    tokenizer = TOKENIZERS[name]()
    ids = some_ids(tokenizer, seeds)
    text, texts = read(decoder_of(tokenizer, skip_special_tokens=skip), ids)
    assert text == joined(texts) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert len(texts) == len(ids)
    if REPLACEMENT not in text:
        assert b"".join(each.raw for each in texts).decode() == text


@NAMES
@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
def test_bytes_of_a_text_joined_decode_to_it(name, words):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("".join(words)).ids
    text, texts = read(decoder_of(tokenizer, skip_special_tokens=True), ids)
    assert text == joined(texts) == tokenizer.decode(ids)
    assert b"".join(each.raw for each in texts).decode() == text


@WITH_BYTES
@settings(max_examples=150, deadline=None)
@given(data=BYTES, special=st.sets(st.integers(0, 39)))
def test_texts_of_malformed_bytes_joined_are_the_text(name, data, special):
    tokenizer = TOKENIZERS[name]()
    (end,) = spelled(name, "<|end|>" if name == "byte_level" else "</s>")
    ids = [end if i in special else each for i, each in enumerate(byte_ids(tokenizer, data))]
    text, texts = read(decoder_of(tokenizer, skip_special_tokens=True), ids)
    assert text == joined(texts) == tokenizer.decode(ids)
    if name == "byte_level":
        assert b"".join(each.raw for each in texts).decode(errors="replace") == text


@NAMES
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_spelled_even_where_the_text_leaves_them_out(name, skip):
    tokenizer = TOKENIZERS[name]()
    end = {"byte_level": "<|end|>", "word_piece": "[SEP]"}.get(name, "</s>")
    ids = [*spelled(name, end), *tokenizer.encode("fox").ids, *spelled(name, end)]
    text, texts = read(decoder_of(tokenizer, skip_special_tokens=skip), ids)
    assert text == joined(texts) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert texts[0].text == end
    assert texts[-1].text.strip() == end
    assert (texts[0].raw, texts[-1].raw) == ((b"", b"") if skip else (end.encode(), texts[-1].text.encode()))


@NAMES
@settings(max_examples=40, deadline=None)
@given(seeds=st.lists(st.integers(0, 10**6), max_size=8), words=st.lists(st.sampled_from(WORDS), max_size=2))
def test_a_token_reads_in_anothers_place_as_if_it_had_been_chosen(name, seeds, words):
    tokenizer = TOKENIZERS[name]()
    decoder = decoder_of(tokenizer, skip_special_tokens=True)
    ids = tokenizer.encode("".join(words)).ids + some_ids(tokenizer, seeds)
    others = ids[-2:] + some_ids(tokenizer, range(0, 10**4, 2003))
    detokenizer = TokenwiseDetokenizer(decoder)
    for place, token_id in enumerate(ids):
        for other, text in zip(others, detokenizer.instead(others), strict=True):
            _, texts = read(decoder, [*ids[:place], other])
            # A character that it begins, or malformed bytes, would be replaced at the end of a text.
            assert text in (texts[-1], texts[-1]._replace(text=texts[-1].text.removesuffix(REPLACEMENT)))
        detokenizer.append([token_id])


@WITH_BYTES
def test_bytes_that_complete_a_character_read_as_that_character(name):
    tokenizer = TOKENIZERS[name]()
    detokenizer = TokenwiseDetokenizer(tokenizer)
    detokenizer.append(byte_ids(tokenizer, "🌊".encode()[:3]))
    others = byte_ids(tokenizer, b"\x8a\x8b\xf0") + tokenizer.encode("fox").ids[:1]
    texts = [each.text for each in detokenizer.instead(others)]
    assert texts[:2] == ["🌊", "🌋"]
    assert texts[2] in ("", REPLACEMENT)
    assert texts[3].strip() in "fox"
    assert detokenizer.append(byte_ids(tokenizer, b"\x8a")) + detokenizer.finish() == "🌊"
    assert [each.text for each in detokenizer.settled()] == ["", "", "", "🌊"]


def test_a_space_stripped_from_the_front_of_a_text_has_no_bytes():
    tokenizer = llama_style()
    ids = byte_ids(tokenizer, b" ")
    assert TokenwiseDetokenizer(tokenizer).instead(ids) == read(tokenizer, ids)[1] == [NO_TEXT]


def test_a_tokens_text_is_known_at_once_unless_it_depends_on_the_next():
    tokenizer = llama_style()
    detokenizer = TokenwiseDetokenizer(tokenizer)
    a, end = spelled("llama_style", "a", "</s>")
    counts = []
    for token_id in [a, end, *byte_ids(tokenizer, "é".encode()), end, a]:
        detokenizer.append([token_id])
        counts.append(len([*detokenizer.settled()]))
    assert counts == [1, 1, 0, 0, 0, 4]


@pytest.mark.parametrize("kind", ["text", "byte run", "special", "malformed"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind, monkeypatch):
    """Counted in tokens that are decoded, with 20 others in the place of each."""
    tokenizer = llama_style()
    decoder = decoder_of(tokenizer, skip_special_tokens=True)
    ids = {
        "text": spelled("llama_style", "▁", "a", "b"),
        "byte run": byte_ids(tokenizer, "船".encode()),
        "special": spelled("llama_style", "</s>"),
        "malformed": byte_ids(tokenizer, b"\xff\xe2"),
    }[kind]
    others = some_ids(tokenizer, range(3, 10**5, 5003))[:20]
    decoded = [0]
    real = type(decoder).decode

    def decode(self, token_ids):
        decoded[0] += len(token_ids)
        return real(self, token_ids)

    monkeypatch.setattr(type(decoder), "decode", decode)

    def cost(num_tokens):
        decoded[0] = 0
        detokenizer = TokenwiseDetokenizer(decoder)
        for index in range(num_tokens):
            detokenizer.instead(others)
            detokenizer.append([ids[index % len(ids)]])
        detokenizer.finish()
        return decoded[0]

    assert cost(300) <= 300 * (3 * 21 + 5)
    assert cost(3000) <= 11 * cost(300)


class CharacterTokenizer:
    """A tokenizer of transformers without Rust inside, whose tokens may end within a character."""

    all_special_ids = (0,)
    pieces = (b"<s>", b"a", " \xe2".encode("latin-1"), b"\x82", b"\xac!", b"\xff")

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        kept = (index for index in ids if index or not skip_special_tokens)
        return b"".join(self.pieces[index] for index in kept).decode(errors="replace")

    def convert_ids_to_tokens(self, index):
        return self.pieces[index].decode("latin-1")


def test_tokenizers_without_a_backend_give_tokens_their_texts_too():
    text, texts = read(decoder_of(CharacterTokenizer(), skip_special_tokens=True), [0, 1, 2, 3, 4, 5, 1])
    assert text == f"a €!{REPLACEMENT}a"
    assert [each.text for each in texts] == ["<s>", "a", " ", "", "€!", REPLACEMENT, "a"]
    assert b"".join(each.raw for each in texts).decode() == text


def test_equal_texts_are_one_object_and_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr("sagellm.engines.text.detokenizer._MAX_SHARED_TEXTS", 3)
    decoder: Decoder = decoder_of(llama_style(), skip_special_tokens=True)
    (a,) = spelled("llama_style", "a")
    assert decoder.text_of(a, "x") is decoder.text_of(a, "x")
    assert [decoder.text_of(a, "x" * count) for count in range(9)][8] == TokenText("x" * 8, b"x" * 8)
    assert len(decoder._shared) <= 3
