"""Tokenizers whose files are missing, empty or another model's are found at loading, not in the output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sagellm.core import CheckpointError, UnsupportedModelError
from sagellm.engines import LLMEngine
from sagellm.engines.loading import load_tokenizer
from sagellm.engines.testing import make_checkpoint, make_tokenizer

EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 11422654\n"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(path: Path) -> LLMEngine:
    return LLMEngine(model=str(path), device="cpu", num_blocks=8)


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "others"),
    [
        ("qwen2", "Qwen2Tokenizer", r"nor vocab\.json with merges\.txt"),
        ("llama", "LlamaTokenizer", r"nor tokenizer\.model"),
        ("llama", None, ""),  # transformers raises here, and makes an empty one above
    ],
)
def test_a_tokenizer_without_a_vocabulary_is_named_with_its_files(copy, model_type, tokenizer_class, others):
    (copy / "tokenizer.json").unlink()
    edit_json(copy / "config.json", model_type=model_type)
    edit_json(copy / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    with pytest.raises(CheckpointError, match=rf"but no tokenizer\.json.*{others}.*--tokenizer"):
        load_tokenizer(copy)


def test_an_engine_does_not_start_with_such_a_tokenizer(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"there is tokenizer_config\.json, but no tokenizer\.json"):
        load(copy)


def test_an_empty_vocabulary_is_an_error(copy):
    (copy / "tokenizer.json").write_text(json.dumps(EMPTY))
    with pytest.raises(CheckpointError, match=r"has no vocabulary.*tokenizer\.json has none"):
        load_tokenizer(copy)


def test_a_sentencepiece_model_alone_says_which_package_it_needs(copy, monkeypatch):
    (copy / "tokenizer.json").rename(copy / "tokenizer.model")
    monkeypatch.setattr("sagellm.engines.loading.tokenizer.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model needs the package sentencepiece"):
        load_tokenizer(copy)


def test_half_of_a_vocabulary_is_named(copy):
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.json").write_text('{"a": 0}')
    edit_json(copy / "config.json", model_type="qwen2")
    with pytest.raises(CheckpointError, match=r"cannot be loaded.*its vocabulary is in vocab\.json"):
        load_tokenizer(copy)


def test_a_tokenizer_of_another_model_is_an_error_with_both_sizes(checkpoint, tmp_path):
    make_tokenizer(700).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has 700 tokens, the model's embedding 515"):
        LLMEngine(model=str(checkpoint), tokenizer=str(tmp_path), device="cpu", num_blocks=8)


def test_an_added_token_without_a_row_is_a_warning(copy, caplog):
    tokenizer = make_tokenizer(515)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert len(tokenizer) == 516
    tokenizer.save_pretrained(copy)
    engine = load(copy)
    assert "no row for <pad>" in caplog.text
    with pytest.raises(ValueError, match="token id 515 is not in the vocabulary of 515"):
        engine.generate("one<pad>two")


def test_rows_without_a_token_are_usual(tmp_path):
    path = make_checkpoint(tmp_path / "padded", vocab_size=1280)
    assert len(load(path).tokenizer) < 1280


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_git_lfs_pointer_is_called_that(copy, name):
    (copy / name).write_text(LFS_POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        load(copy)


def test_a_tokenizer_with_code_of_its_own_is_refused(copy):
    edit_json(
        copy / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]},
    )
    (copy / "own.py").write_text("raise SystemExit('ran')")
    (copy / "tokenizer.json").unlink()
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"code of its own|no vocabulary"):
        load_tokenizer(copy)
