import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders as steps, models
from transformers import PreTrainedTokenizerFast

from sagellm.engines.testing import decoders
from sagellm.engines.testing.decoders import (
    CORPUS,
    byte_characters,
    byte_level,
    llama_style,
    word_piece,
)
from sagellm.engines.text.detokenizer import IncrementalDetokenizer, TokenwiseDetokenizer, decoder_of
from sagellm.testing.cost import least_cpu_ns, slowness

SAMPLES = [
    *CORPUS[:5],
    " leading and trailing ",
    "naïve café ☕️ ελληνικά नमस्ते 한국어",
    "👨‍👩‍👧‍👦" * 3,
    "\ufffd real replacement \ufffd\ufffd",
    "",
]


TOKENIZERS = {
    **decoders.TOKENIZERS,
    "transformers": lambda: PreTrainedTokenizerFast(tokenizer_object=byte_level()),
}


def backend(name):
    tokenizer = TOKENIZERS[name]()
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def stream(tokenizer, ids, *, step=1, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.append(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", SAMPLES)
def test_streamed_text_equals_the_whole(name, text):
    tokenizer = TOKENIZERS[name]()
    ids = backend(name).encode(text).ids
    for step in (1, 2, 7):
        assert "".join(stream(tokenizer, ids, step=step)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(text=st.text(max_size=40), step=st.integers(1, 4))
def test_streamed_text_equals_the_whole_for_any_text(name, text, step):
    tokenizer = backend(name)
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, ids, step=step)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=250, deadline=None)
@given(seeds=st.lists(st.integers(0, 10**6), max_size=80), step=st.integers(1, 5), skip=st.booleans())
def test_streamed_text_equals_the_whole_for_any_ids(name, seeds, step, skip):
    tokenizer = backend(name)
    # Some ids beyond the vocabulary, as models have more rows than their tokenizer has tokens.
    ids = [seed % (tokenizer.get_vocab_size() + 5) for seed in seeds]
    pieces = stream(tokenizer, ids, step=step, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


BYTES = st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x41, 0xC3]), max_size=120)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "llama_style"])
@settings(max_examples=150, deadline=None)
@given(values=BYTES, special=st.sets(st.integers(0, 119)))
def test_streamed_text_equals_the_whole_for_malformed_bytes(name, values, special):
    tokenizer = TOKENIZERS[name]()
    if name == "byte_level":
        (end,) = (tokenizer.token_to_id("<|end|>"),)
        characters = {byte: tokenizer.token_to_id(token) for byte, token in enumerate(byte_characters())}
    else:
        end = tokenizer.token_to_id("</s>")
        characters = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    ids = [end if place in special else characters[value] for place, value in enumerate(values)]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("run", [[0xFF], [0xE2, 0x82], [0xF0, 0x9F, 0x98], [0xC3, 0xE2, 0x82, 0xFF]])
@pytest.mark.parametrize("end", [[], [0xAC], [0x80], [0x41]])
def test_streamed_text_equals_the_whole_for_long_malformed_runs(run, end):
    tokenizer = byte_level()
    characters = byte_characters()
    ids = [tokenizer.token_to_id(characters[value]) for value in [*run * 70, *end]]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces[-1]) <= 1


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "llama_style"])
def test_no_piece_has_half_a_character(name):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("the 👩🏾‍🚀 and あ🦜⚗️ fox é").ids
    assert len(ids) > 20, "the characters must be cut"
    assert not any("\ufffd" in piece for piece in stream(tokenizer, ids))


def test_text_is_returned_as_soon_as_it_is_certain():
    tokenizer = byte_level()
    ids = tokenizer.encode("The quick fox").ids
    assert stream(tokenizer, ids) == [*(tokenizer.decode([token_id]) for token_id in ids), ""]
    tokenizer = word_piece()
    ids = tokenizer.encode("the quick fox").ids
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert all(detokenizer.append([token_id]) for token_id in ids)


def test_spaces_survive_special_tokens_between_words():
    tokenizer = llama_style()
    space, a, end = (tokenizer.token_to_id(token) for token in ("▁", "a", "</s>"))
    ids = [space, a, end, space, end, end, a]
    assert stream(tokenizer, ids) == ["", "a", "", " ", "", "", "a", ""]
    assert "".join(stream(tokenizer, ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_nothing_comes_of_no_tokens():
    detokenizer = IncrementalDetokenizer(byte_level())
    assert detokenizer.append([]) == ""
    assert detokenizer.finish() == ""


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["text", "malformed", "special"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind):
    tokenizer = byte_level()
    characters = byte_characters()
    ids = {
        "text": tokenizer.encode(CORPUS[0]).ids,
        "malformed": [tokenizer.token_to_id(characters[0xFF]), tokenizer.token_to_id(characters[0xE2])],
        "special": [tokenizer.token_to_id("<|end|>")],
    }[kind]

    def append(num_tokens):
        detokenizer = IncrementalDetokenizer(tokenizer)
        for index in range(num_tokens):
            detokenizer.append([ids[index % len(ids)]])

    short_ns = least_cpu_ns(lambda: append(500), 10)
    # Ten times the tokens; a hundred times the cost if it grew.
    assert least_cpu_ns(lambda: append(5000), 3) < 40 * short_ns
    assert short_ns < 0.5e9 * slowness()


def words(decoder, *tokens):
    """A tokenizer that has these tokens, spelled as they are."""
    vocab = {token: index for index, token in enumerate([*tokens, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoder
    return tokenizer


A_TO_NOTHING = steps.Sequence([steps.Replace("a", "b"), steps.Replace("b", "")])
STRIPPED = [steps.Replace("▁", " "), steps.Replace("a", ""), steps.ByteFallback(), steps.Fuse()]
HOSTILE = {
    "replaced": words(steps.Replace("a", ""), "a" * 64),
    "replaced twice": words(A_TO_NOTHING, "a" * 64),
    "stripped": words(steps.Strip("a", 8, 0), "a" * 8),
    "bytes": words(steps.ByteLevel(), ""),
    "fused": words(steps.Fuse(), ""),
    "two": words(A_TO_NOTHING, "a" * 64, "ab"),
    "beside special ones": words(steps.Fuse(), "", "<s>"),
    "beside half a character": words(A_TO_NOTHING, "a" * 64, "\ufffd"),
    "replacements": words(steps.Fuse(), "\ufffd" * 4096),
    "across": words(steps.Sequence([steps.Fuse(), steps.Replace("xy", "")]), "x", "y"),
}
HOSTILE["beside special ones"].add_special_tokens(["<s>"])


@pytest.mark.parametrize("kind", [IncrementalDetokenizer, TokenwiseDetokenizer])
@pytest.mark.parametrize("num_words", [0, 1])
@pytest.mark.parametrize("name", HOSTILE)
def test_the_cost_of_a_token_does_not_grow_with_the_text_whatever_decodes_it(
    name, num_words, kind, monkeypatch
):
    """Counted in the characters of tokens that are decoded, and in a fixed part for each token."""
    tokenizer = HOSTILE[name]
    num_ids = tokenizer.get_vocab_size() - 1
    decoder = decoder_of(tokenizer, skip_special_tokens=True)
    decoded = [0]
    real = type(decoder).decode

    def decode(self, token_ids):
        decoded[0] += sum(8 + len(tokenizer.id_to_token(token_id)) for token_id in token_ids)
        return real(self, token_ids)

    monkeypatch.setattr(type(decoder), "decode", decode)

    def cost(num_tokens):
        decoded[0] = 0
        detokenizer = kind(decoder)
        for token_id in [num_ids] * num_words + [index % num_ids for index in range(num_tokens)]:
            detokenizer.append([token_id])
        detokenizer.finish()
        return decoded[0]

    longest = max(map(len, tokenizer.get_vocab()))
    assert cost(300) <= 300 * (6 * longest + 500)
    assert cost(3000) <= 11 * cost(300)


POSITIONAL = {
    "metaspace": words(
        steps.Sequence([steps.ByteFallback(), steps.Replace("a", ""), steps.Metaspace()]),
        *("a", "▁", "▁▁", "▁b", "<0xE2>", "<0x82>", "<0xAC>", "", "\ufffd"),
    ),
    "one space stripped": words(
        steps.Sequence([*STRIPPED, steps.Strip(" ", 1, 0)]),
        *("a", "aa", "▁", "▁b", "<0xE2>", "<0x82>", "<0xAC>", "<0x20>", "", "\ufffd"),
    ),
    "spaces stripped": words(
        steps.Sequence([*STRIPPED, steps.Strip(" ", 8, 0)]), "a", "▁", "▁▁", "▁b", "<0xE2>", ""
    ),
    "word pieces": words(steps.WordPiece(cleanup=False), "##", "##a", "b", "", "\ufffd"),
    "suffixes": words(steps.BPEDecoder("</w>"), "</w>", "a</w>", "b", "", "\ufffd"),
    "bytes": words(
        steps.Sequence([steps.ByteLevel()]), "a", "", *map(byte_characters().__getitem__, (226, 130, 172))
    ),
}


@pytest.mark.parametrize("name", POSITIONAL)
@settings(max_examples=300, deadline=None)
@given(runs=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40)), max_size=12), step=st.integers(1, 3))
def test_streamed_text_equals_the_whole_beside_tokens_without_text(name, runs, step):
    tokenizer = POSITIONAL[name]
    ids = [seed % (tokenizer.get_vocab_size() - 1) for seed, count in runs for _ in range(count)]
    assert "".join(stream(tokenizer, ids, step=step)) == tokenizer.decode(ids)
    detokenizer = TokenwiseDetokenizer(tokenizer)
    pieces = [detokenizer.append([token_id]) for token_id in ids]
    texts = [*detokenizer.settled()]
    assert "".join([*pieces, detokenizer.finish()]) == tokenizer.decode(ids)
    assert len([*texts, *detokenizer.settled()]) == len(ids)


class PythonTokenizer:
    """What remains of transformers' tokenizers that have no Rust inside."""

    all_special_ids = (0,)
    pieces = ("", "He", "llo", " wor", "ld")

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        assert not clean_up_tokenization_spaces
        return "".join(
            "<s>" if index == 0 and not skip_special_tokens else self.pieces[index] for index in ids
        )

    def convert_ids_to_tokens(self, index):
        return self.pieces[index]


@pytest.mark.parametrize(("skip", "expected"), [(True, "Hello world"), (False, "<s>Hello world<s>")])
def test_tokenizers_without_a_backend_are_decoded_too(skip, expected):
    assert "".join(stream(PythonTokenizer(), [0, 1, 2, 3, 4, 0], skip=skip)) == expected
