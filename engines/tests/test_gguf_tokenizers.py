"""The tokenizer of a GGUF file gives the tokens of the one that it was made of."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sagellm.core import CheckpointError, UnsupportedModelError
from sagellm.engines.embedded import embedded_model
from sagellm.engines.loading import load_tokenizer
from sagellm.engines.loading.json_tokenizer_files import QWEN2_WORDS
from sagellm.engines.loading.tokenizer import check_tokenizer, open_tokenizer
from sagellm.engines.testing.gguf import copy_as_gguf, write_gguf
from sagellm.engines.testing.tokenizers import TEXT

TEXTS = [
    *TEXT.splitlines(),
    TEXT,
    "",
    " ",
    "  two  spaces   three",
    "\n\n\t tabs\r\n",
    "1234567 numbers 12,345.67",
    "I'm WE'RE they'll",
    "é e\u0301 ﬁ 你好, мир! 🙂👩‍👩‍👧",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "<tool_call>{}</tool_call>",
    "x" * 300,
]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = [{"role": "user", "content": "Is it far?"}]


def assert_equal(ours: Any, theirs: Any) -> None:
    for text in TEXTS:
        for add_special_tokens in (False, True):
            one, other = (
                each(text, add_special_tokens=add_special_tokens)["input_ids"] for each in (ours, theirs)
            )
            assert one == other, text
        for skip in (False, True):
            assert ours.decode(one, skip_special_tokens=skip) == theirs.decode(one, skip_special_tokens=skip)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_the_embedded_models_tokenizer_survives(tmp_path: Path) -> None:
    file = copy_as_gguf(embedded_model(), tmp_path / "m.gguf", "BF16", pre="smollm")
    ours, theirs = open_tokenizer(file), open_tokenizer(embedded_model())
    assert ours is not None
    assert theirs is not None
    assert_equal(ours, theirs)
    check_tokenizer(ours, 4096, file)
    for options in ({}, {"add_generation_prompt": True}):
        rendered = [each.apply_chat_template(CHAT, tokenize=False, **options) for each in (ours, theirs)]
        assert rendered[0] == rendered[1]
    loaded = load_tokenizer(file)
    assert loaded is not None
    assert loaded(TEXT)["input_ids"] == ours(TEXT)["input_ids"]
    rendered = loaded.apply_chat_template(CHAT, tokenize=False)
    assert rendered == ours.apply_chat_template(CHAT, tokenize=False)


def byte_level(folder: Path, words: str, *, bos: str | None = None, **options: Any) -> Path:
    """Write a tokenizer as Llama 3 or Qwen publish theirs, trained on a text of our own, beside a model."""
    shutil.copytree(embedded_model(), folder)
    tokenizer = Tokenizer(models.BPE(**options))
    if bos is None:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT * 2], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = json.loads((folder / "tokenizer.json").read_text())
    for token in whole["added_tokens"]:
        token["normalized"] = False
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": bos} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["qwen2", "llama-bpe"])
def test_a_byte_level_tokenizer_survives(kind: str, tmp_path: Path) -> None:
    is_qwen = kind == "qwen2"
    words = QWEN2_WORDS if is_qwen else LLAMA3_WORDS
    bos = None if is_qwen else "<|endoftext|>"
    folder = byte_level(tmp_path / "model", words, bos=bos, ignore_merges=not is_qwen)
    entries_of = copy_as_gguf(folder, tmp_path / "m.gguf", "BF16", pre=kind, add_bos_token=not is_qwen)
    assert_equal(open_tokenizer(entries_of), open_tokenizer(folder))


def pieces_of() -> list[str]:
    """Return SentencePiece's pieces in the order of their scores: bytes apart, letters last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=lambda piece: (len(piece) == 1, vocab[piece]))


def sentencepiece_entries() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces_of(), "<|im_end|>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 3]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}</s>",
    }


def sentencepiece(text: str, entries: dict[str, Any]) -> list[int]:
    """Return the ids as SentencePiece's BPE finds them: the best pair is joined, repeatedly."""
    tokens, scores = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[ids[one + other]], place)
            for place, (one, other) in enumerate(pairwise(parts))
            if one + other in ids
        ]
        if not pairs:
            break
        _, place = min(pairs)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def test_sentencepiece_joins_by_the_scores(tmp_path: Path) -> None:
    entries = sentencepiece_entries()
    write_gguf(tmp_path / "m.gguf", entries, {})
    tokenizer = open_tokenizer(tmp_path / "m.gguf")
    assert tokenizer is not None
    for text in TEXTS:
        if not text or "<" in text:
            continue
        expected = sentencepiece(text, entries)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
        assert tokenizer(text)["input_ids"] == [1, *expected]
        assert tokenizer.decode(expected) == text
    end = entries["tokenizer.ggml.tokens"].index("<|im_end|>")
    ids = tokenizer("a<|im_end|>b", add_special_tokens=False)["input_ids"]
    assert ids == [*sentencepiece("a", entries), end, *sentencepiece("b", entries)]
    assert tokenizer.decode([1, *ids], skip_special_tokens=True) == "a b"
    check_tokenizer(tokenizer, len(entries["tokenizer.ggml.tokens"]), tmp_path)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert rendered == "Is it far?</s>"


def test_a_file_may_say_what_surrounds_a_text(tmp_path: Path) -> None:
    flags = {
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template.rag": "{{ documents }}",
    }
    write_gguf(tmp_path / "m.gguf", sentencepiece_entries() | flags, {})
    tokenizer: Any = open_tokenizer(tmp_path / "m.gguf")
    whole = tokenizer("The clock")["input_ids"]
    assert whole[-1] == 2
    assert whole[0] != 1
    assert tokenizer.decode(whole[:-1]) == "The clock"
    assert set(tokenizer.chat_template) == {"default", "rag"}


@pytest.mark.parametrize(
    ("entries", "kind", "message"),
    [
        ({"model": "bert"}, UnsupportedModelError, "of the kind 'bert'.*name another tokenizer"),
        ({"tokens": []}, CheckpointError, "has no vocabulary"),
        ({"token_type": [1]}, CheckpointError, r"types for 1 and scores for \d+ of them"),
        ({"bos_token_id": 1 << 20}, CheckpointError, "bos_token_id is 1048576, and there are"),
        ({"model": "gpt2", "pre": "viking"}, UnsupportedModelError, "divides words by 'viking'"),
        ({"model": "gpt2", "merges": ["a q q"]}, CheckpointError, "merges has 'a q q', which does not make"),
        ({"scores": None}, CheckpointError, "has no scores"),
        ({"tokens": 7}, CheckpointError, "tokens is not a list"),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_read_is_named(
    tmp_path: Path, entries: dict[str, Any], kind: type[Exception], message: str
) -> None:
    changed = sentencepiece_entries() | {f"tokenizer.ggml.{name}": each for name, each in entries.items()}
    file = tmp_path / "m.gguf"
    write_gguf(file, {name: each for name, each in changed.items() if each is not None}, {})
    with pytest.raises(kind, match=rf"m\.gguf.*{message}"):
        open_tokenizer(file)


def test_pieces_that_would_take_minutes_are_refused(tmp_path: Path) -> None:
    entries = sentencepiece_entries()
    for name, value in {"tokens": "", "token_type": 1, "scores": 0.0}.items():
        more = [str(index) * 800 for index in range(200)] if name == "tokens" else [value] * 200
        entries[f"tokenizer.ggml.{name}"] = entries[f"tokenizer.ggml.{name}"] + more
    write_gguf(tmp_path / "m.gguf", entries, {})
    with pytest.raises(CheckpointError, match="characters in all halves of its pieces; there may be at most"):
        open_tokenizer(tmp_path / "m.gguf")


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {})
    assert open_tokenizer(tmp_path / "m.gguf") is None
    assert "has no tokenizer; prompts must be token ids" in caplog.text
