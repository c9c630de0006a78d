"""Tokenizers beyond what real ones have are refused before they are built, decoders before they serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from sagellm.core import CheckpointError
from sagellm.engines import LLMEngine
from sagellm.engines.loading import load_tokenizer
from sagellm.engines.loading.tokenizer import check_tokenizer, open_tokenizer
from sagellm.engines.testing import make_tokenizer

REGEX = {"type": "Replace", "pattern": {"Regex": "(a|a|aa)+$"}, "content": ""}
SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FUSE, BYTES = {"type": "Fuse"}, {"type": "ByteFallback"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
VOCAB_SIZE = 515


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def added(token: str, *, normalized: bool = False) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": VOCAB_SIZE, "content": token, "normalized": normalized, **flags}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """A tokenizer.json that is used as it is."""
    return dict(json.loads(make_tokenizer(VOCAB_SIZE).backend_tokenizer.to_str()))


@pytest.fixture
def write(plain, tmp_path):
    """Write the files of a tokenizer with changes, and return their directory."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))

    def write(*, text: str | None = None, settings: dict[str, Any] | None = None, **changes: Any) -> Path:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings or {}))
        (tmp_path / "tokenizer.json").write_text(text or json.dumps(plain | changes))
        return tmp_path

    return write


@pytest.fixture
def never_built(monkeypatch):
    """Fail where a tokenizer is built."""

    def build(*_: object, **__: object) -> None:
        pytest.fail("it was built")

    monkeypatch.setattr("sagellm.engines.loading.json_tokenizer_files.Backend.from_file", build)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", build)


def opened(path: Path, vocab_size: int = VOCAB_SIZE) -> Any:
    tokenizer = open_tokenizer(path)
    check_tokenizer(tokenizer, vocab_size, path)
    return tokenizer


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (REGEX, "replaces what a regular expression matches"),
        (sequence(FUSE, sequence(REGEX)), "replaces what a regular expression matches"),
        ({"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True}, "of the kind CTC"),
        (sequence(*[FUSE] * 8), "has 9 steps, 0 of them Replace"),
        (sequence(*[SPACE] * 3), "has 4 steps, 3 of them Replace"),
        (sequence(*[FUSE] * 100_000), "bytes besides its tokens"),
        (replace("a" * 17, ""), "up to 17 characters"),
        ({"type": "WordPiece", "prefix": "#" * 17, "cleanup": True}, "up to 17 characters"),
        (
            {"type": "Strip", "content": " ", "start": 10**18, "stop": 0},
            "strips up to 1,000,000,000,000,000,000",
        ),
        (sequence(*[{"type": "Strip", "content": " ", "start": 2, "stop": 1}] * 3), "strips up to 9"),
        (replace("a", "b" * 5), "can make a text 5 times as long"),
        (replace("", "bbbb"), "can make a text 5 times as long"),
        (sequence(replace("a", "aaa"), replace("a", "aa")), "can make a text 6 times as long"),
        (replace("_", " "), "replaces up to 65 places of a token"),
    ],
)
def test_a_decoder_that_may_take_long_is_refused(write, plain, decoder, reason):
    tokens = [*plain["added_tokens"], added("_" * 65)]
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{reason}"):
        opened(write(decoder=decoder, added_tokens=tokens))


def test_the_refusal_says_which_decoders_there_may_be(write):
    with pytest.raises(CheckpointError, match=r"8 steps of the kinds BPEDecoder, .* and no regular"):
        opened(write(decoder=REGEX))


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        BYTE_LEVEL,  # GPT-2, Llama 3, Qwen
        sequence(SPACE, BYTES, FUSE, {"type": "Strip", "content": " ", "start": 1, "stop": 0}),  # Llama 2
        sequence(SPACE, BYTES, FUSE),  # Gemma
        METASPACE,  # XLNet, XGLM
        sequence(BYTES, METASPACE),
        {"type": "WordPiece", "prefix": "##", "cleanup": True},  # BERT
        {"type": "BPEDecoder", "suffix": "</w>"},  # GPT
        replace("</w>", " "),
    ],
)
def test_the_decoders_of_published_models_are_loaded(write, decoder):
    tokenizer = opened(write(decoder=decoder))
    ids = tokenizer("a b")["input_ids"]
    assert tokenizer.decode(ids) == Tokenizer.from_file(
        str(write(decoder=decoder) / "tokenizer.json")
    ).decode(ids)


def test_an_engine_refuses_such_a_decoder(checkpoint, write):
    with pytest.raises(CheckpointError, match="regular expression"):
        LLMEngine(model=str(checkpoint), tokenizer=str(write(decoder=REGEX)), device="cpu", num_blocks=8)


@pytest.mark.parametrize("place", ["vocabulary", "tokenizer.json", "tokenizer_config.json"])
def test_a_token_has_at_most_4096_characters(write, plain, place):
    def written(length: int) -> Path:
        token, model = "x" * length, plain["model"]
        if place == "vocabulary":
            vocab = {name: index for name, index in model["vocab"].items() if index != VOCAB_SIZE - 1}
            merges = [pair for pair in model["merges"] if "".join(pair) in vocab]
            return write(model=model | {"vocab": vocab | {token: VOCAB_SIZE - 1}, "merges": merges})
        if place == "tokenizer.json":
            return write(added_tokens=[*plain["added_tokens"], added(token)])
        return write(settings={"extra_special_tokens": [token]})

    assert len(opened(written(4096), VOCAB_SIZE + 1)) <= VOCAB_SIZE + 1
    with pytest.raises(CheckpointError, match="4,097 characters"):
        opened(written(4097), VOCAB_SIZE + 1)


LISTS = {
    "vocabulary": ('{"model":{"vocab":{', (1 << 20) + 1, '"%d":1', "}}}", "entries in model.vocab"),
    "pieces": ('{"model":{"vocab":[', (1 << 20) + 2, '["%d",1]', "]}}", "entries in model.vocab"),
    "long pieces": ('{"model":{"vocab":[', 1100, '["%04000d",1]', "]}}", "4,400,000 bytes of pieces in"),
    "long tokens": ('{"model":{"vocab":{', 12_600, '"%04000d":1', "}}}", "bytes in model.vocab"),
    "merges": ('{"model":{"merges":[', (1 << 20) + 2, '["%d","a"]', "]}}", "entries in model.merges"),
    "older merges": ('{"model":{"merges":[', (1 << 20) + 1, '"%d a"', "]}}", "entries in model.merges"),
    "added": (
        '{"model":{},"added_tokens":[',
        (1 << 17) + 1,
        '{"content":"%d"}',
        "]}",
        "131,073 added tokens",
    ),
    "braces": ('{"model":{},"added_tokens":[', (1 << 18) + 1, "{}", "]}", "262,145 braces in added_tokens"),
    "long added": (
        '{"model":{},"added_tokens":[',
        300,
        '{"content":"%04000d"}',
        "]}",
        "1,200,000 characters",
    ),
    "pattern": ('{"model":{},"decoder":{"Regex":"', 17_000, "a", '"}}', "33,999 characters of regular"),
    "rest": ('{"model":{},"post_processor":"', 300_000, "a", '"}', "bytes besides its tokens"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_tokenizer_beyond_a_limit_is_refused_before_it_is_built(write, never_built, name):
    before, count, entry, after, reason = LISTS[name]
    entries = (entry % number if "%" in entry else entry for number in range(count))
    path = write(text=before + ",".join(entries) + after)
    for load in (open_tokenizer, load_tokenizer):
        with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{reason}"):
            load(path)


@pytest.mark.parametrize("part", ["decoder", "normalizer", "pre_tokenizer", "post_processor", "model"])
@pytest.mark.parametrize("depth", [40, 10_000])
def test_a_part_that_is_deeply_nested_is_refused(write, never_built, part, depth):
    text = f'{{"model":{{}},"{part}":' + '{"steps":[' * depth + "]}" * depth + "}"
    with pytest.raises(
        CheckpointError, match=r"cannot be loaded: tokenizer\.json: .*(nested|recursion|two entries)"
    ):
        open_tokenizer(write(text=text))


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    ],
)
def test_a_file_of_a_tokenizer_without_end_is_not_read(write, never_built, name):
    path = write()
    (path / name).unlink(missing_ok=True)
    with open(path / name, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=rf"{name} has 1,099,511,627,776 bytes"):
        open_tokenizer(path)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is not a regular file"):
        open_tokenizer(path)


def test_an_additional_template_without_end_is_not_read(write, never_built):
    path = write()
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tools.jinja").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"tools\.jinja cannot be read"):
        open_tokenizer(path)


@pytest.mark.parametrize(("name", "mark"), [("vocab.json", ":"), ("vocab.txt", "\n"), ("merges.txt", "\n")])
def test_a_vocabulary_in_a_file_of_its_own_has_the_same_limit(write, never_built, name, mark):
    path = write()
    (path / name).write_text(mark * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match=rf"{name} has 1,048,577 entries"):
        open_tokenizer(path)


@pytest.mark.parametrize("name", ["decoder", "normalizer", "model"])
def test_a_part_that_occurs_twice_is_refused(write, plain, never_built, name):
    """Two parsers may take different ones."""
    text = json.dumps(plain)
    twice = f'{text[:-1]}, "{name[0]}\\u{ord(name[1]):04x}{name[2:]}": {json.dumps(plain[name])}}}'
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: it has two entries '{name}'"):
        open_tokenizer(write(text=twice))


@pytest.mark.parametrize(
    ("normalizer", "token", "reason"),
    [
        (REGEX, "a" * 1025, "1,025 characters of added tokens to search"),
        ({"type": "Sequence", "normalizers": [REGEX, REGEX]}, "a" * 513, "1,026 characters of added"),
        ({"type": "Precompiled", "precompiled_charsmap": ""}, "a" * 1025, "1,025 characters of added"),
        (replace("a", "b" * 2000), "a" * 4000, "8,000,000 characters of normalized added tokens"),
        ({"type": "Prepend", "prepend": "b" * 2000}, "a" * 4000, "8,000,000 characters of normalized"),
        (replace("", "b" * 2000), "a" * 4000, "characters of normalized added tokens"),
    ],
)
@pytest.mark.parametrize("place", ["tokenizer.json", "added_tokens_decoder", "eos_token"])
def test_a_normalizer_that_may_take_long_when_loading_is_refused(
    write, plain, never_built, normalizer, token, reason, place
):
    if place == "tokenizer.json":
        path = write(
            normalizer=normalizer, added_tokens=[*plain["added_tokens"], added(token, normalized=True)]
        )
    else:
        given = {"content": token, "normalized": True}
        settings = {place: {"515": given} if place == "added_tokens_decoder" else given}
        path = write(normalizer=normalizer, settings=settings)
    with pytest.raises(CheckpointError, match=reason):
        open_tokenizer(path)


def test_regular_expressions_in_a_normalizer_are_loaded(write, plain):
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    added_tokens = [*plain["added_tokens"], added("a" * 4000), added("word", normalized=True)]
    tokenizer = opened(write(normalizer=spaces, added_tokens=added_tokens), VOCAB_SIZE + 2)
    assert tokenizer("a  b")["input_ids"] == tokenizer("a b")["input_ids"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"continuing_subword_prefix": "##"}, "PanicException"),
        ({"merges": [["nowhere", "a"]]}, "Token `nowhere` out of vocabulary"),
        ({"merges": ["a b c"]}, "Merges text file invalid"),
    ],
)
def test_damaged_merges_are_an_error_that_names_the_file(write, plain, changes, reason):
    with pytest.raises(CheckpointError, match=rf"cannot be loaded: .*{reason}.* is in tokenizer\.json"):
        open_tokenizer(write(model=plain["model"] | changes))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model": []}', '{"model": {}, "added_tokens": [1]}', "\xff", ""]
)
def test_what_is_not_a_tokenizer_is_an_error_that_names_the_file(write, text):
    path = write()
    (path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"cannot be loaded: tokenizer\.json: "):
        open_tokenizer(path)


def test_tens_of_thousands_of_added_tokens_are_loaded_and_few_are_named(write, plain, caplog):
    """Models of speech have as many, and settings of more than 4 MiB."""
    tokens = [added(f"<|s_{number}|>") | {"id": VOCAB_SIZE + number} for number in range(33_000)]
    decoder = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in tokens
    }
    path = write(added_tokens=[*plain["added_tokens"], *tokens], settings={"added_tokens_decoder": decoder})
    assert (path / "tokenizer_config.json").stat().st_size > 4 << 20
    tokenizer = opened(path)
    assert tokenizer("<|s_32999|>")["input_ids"] == [VOCAB_SIZE + 32_999]
    assert "no row for <|s_0|>, <|s_1|>, <|s_2|>, <|s_3|>, <|s_4|> and 32,995 more of" in caplog.text
