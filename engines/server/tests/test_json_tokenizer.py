"""Tokenizers made without transformers do what transformers' do with the same files."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sagellm.core import CheckpointError
from sagellm.engines.embedded import embedded_model
from sagellm.engines.loading.json_tokenizer_files import NeedsTransformersError, open_json_tokenizer
from sagellm.engines.loading.tokenizer import load_tokenizer, open_tokenizer
from sagellm.engines.models.quiet import quiet_transformers
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.tokenizers import CHAT_TEMPLATE, SPECIAL_TOKENS, TEXT
from sagellm.engines.text import IncrementalDetokenizer
from sagellm.engines.text.json_tokenizer import JsonTokenizer
from sagellm.server.http.tokenizing import tokenizer_info

TEXTS = (
    "Hello, world!  How\tare you?\n\n",
    " it's 1234 — don't",
    "Das Boot <|im_end|>liegt<s> im Hafen</s> .",
    "船は港にある。 Лодка ⚓🌊é é",
    "<|im_start|>user\nx<|endoftext|><tool>y <tool> z<unk>",
    "",
    " ",
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>it</b>?"},
    {"role": "assistant", "content": "船"},
]
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast"),
    *("LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast"),
)
FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
SETTINGS: dict[str, tuple[Any, ...]] = {
    "bos_token": (None, "<s>", "<|im_start|>", "<new>"),
    "eos_token": (None, "</s>", "<|im_end|>"),
    "unk_token": (None, "<unk>", "<|endoftext|>"),
    "pad_token": (None, "<|endoftext|>", "<pad>"),
    "add_bos_token": (True, False),
    "add_eos_token": (True, False),
    "add_prefix_space": (True, False, None),
    "legacy": (True, False),
    "clean_up_tokenization_spaces": (False, True),
    "model_max_length": (512, 10**30, None),
    "padding_side": ("left", "right"),
    "split_special_tokens": (False, True),
    "additional_special_tokens": ([], ["<tool>", "<|im_start|>"]),
    "extra_special_tokens": ([], ["<|im_end|>"]),
    "chat_template": (CHAT_TEMPLATE, [{"name": "default", "template": "{{ bos_token }}{{ messages }}"}]),
}


@cache
def serialized(kind: str) -> str:
    """Return a tokenizer.json as the models of a kind have it."""
    is_metaspace = kind == "llama2"
    tokenizer = Tokenizer(models.BPE(byte_fallback=is_metaspace, fuse_unk=is_metaspace))
    special = ["<unk>", "<s>", "</s>"] if is_metaspace else list(SPECIAL_TOKENS)
    alphabet = [] if is_metaspace else pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if is_metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    match kind:
        case "llama2":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            tokenizer.pre_tokenizer = None
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        case "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    if kind in ("llama2", "llama3"):
        begin = special[1]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return str(tokenizer.to_str())


def write(folder: Path, rng: random.Random) -> Path:
    """Write the files of a tokenizer that a model of one of our families may have."""
    kind = rng.choice(("chatml", "llama2", "llama3", "qwen2"))
    (folder / "tokenizer.json").write_text(serialized(kind))
    model_type = rng.choice(("llama", "mistral", "qwen2", "qwen3"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 800}))
    settings = {name: rng.choice(values) for name, values in SETTINGS.items() if rng.random() < 0.4}
    if (name := rng.choice(CLASSES)) is not None:
        settings["tokenizer_class"] = name
    if rng.random() < 0.2:
        settings["eos_token"] = {
            "__type": "AddedToken",
            "content": "</s>",
            "lstrip": True,
            "normalized": False,
        }
    if rng.random() < 0.4:
        added = Tokenizer.from_str(serialized(kind)).get_added_tokens_decoder()
        settings["added_tokens_decoder"] = {
            str(index): {
                **{"content": token.content, "special": token.special, "normalized": token.normalized},
                **{"lstrip": token.lstrip, "rstrip": rng.random() < 0.2, "single_word": False},
            }
            for index, token in added.items()
        }
        if rng.random() < 0.5:
            settings["added_tokens_decoder"]["900"] = {"content": "<tool>", "special": rng.random() < 0.5}
    elif rng.random() < 0.4:
        token = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": True, "single_word": False}
        mapped = {"bos_token": token, "eos_token": "</s>", "additional_special_tokens": ["<tool>"]}
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    if rng.random() < 0.3:
        (folder / "chat_template.jinja").write_text("{{ eos_token }}" + CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def check_equal(own: Any, theirs: Any) -> None:
    """Compare everything that the engine uses."""
    assert own.get_vocab() == theirs.get_vocab()
    assert list(map(repr, own.added_tokens_decoder.items())) == list(
        map(repr, theirs.added_tokens_decoder.items())
    )
    for name in ("all_special_tokens", "all_special_ids", "special_tokens_map", "chat_template"):
        assert getattr(own, name) == getattr(theirs, name), name
    for name in ("bos_token", "eos_token_id", "pad_token_id", "model_max_length", "extra_special_tokens"):
        assert getattr(own, name) == getattr(theirs, name), name
    assert (len(own), tokenizer_info(own)) == (len(theirs), tokenizer_info(theirs))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert own(text)["input_ids"] == ids, text
        assert (
            own(text, add_special_tokens=False)["input_ids"]
            == (theirs(text, add_special_tokens=False)["input_ids"])
        )
        assert own.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        for is_skipped in (False, True):
            assert own.decode(ids, skip_special_tokens=is_skipped) == (
                theirs.decode(ids, skip_special_tokens=is_skipped)
            )
            pieces = [IncrementalDetokenizer(each, skip_special_tokens=is_skipped) for each in (own, theirs)]
            assert [pieces[0].append([i]) for i in ids] == [pieces[1].append([i]) for i in ids]
    if own.chat_template is not None:
        call: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "mood": "grave"}
        assert own.apply_chat_template(MESSAGES, **call) == theirs.apply_chat_template(MESSAGES, **call)
    assert "transformers" not in vars(own), "nothing was passed on"


def check_generated(folder: Path, rng: random.Random) -> bool:
    """Compare the two tokenizers of generated files; say whether ours could be made."""
    write(folder, rng)
    try:
        own = open_json_tokenizer(folder)
    except NeedsTransformersError:
        return False
    except Exception:
        with quiet_transformers(), pytest.raises(CheckpointError):
            load_tokenizer(folder)
        return True
    with quiet_transformers():
        check_equal(own, load_tokenizer(folder))
    return True


def test_generated_tokenizers_do_what_those_of_transformers_do(tmp_path):
    rng, num_made = random.Random(0), 0
    for number in range(25):
        (tmp_path / str(number)).mkdir()
        num_made += check_generated(tmp_path / str(number), rng)
    assert num_made == 25


@pytest.mark.full
def test_a_thousand_generated_tokenizers_do_what_those_of_transformers_do(tmp_path):
    rng = random.Random(1)
    for number in range(1000):
        (tmp_path / str(number)).mkdir()
        assert check_generated(tmp_path / str(number), rng)


def test_the_embedded_model_has_transformers_tokens():
    check_equal(open_tokenizer(embedded_model()), load_tokenizer(embedded_model()))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_checkpoints_of_our_families_need_no_transformers(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family)
    own = open_tokenizer(path)
    assert isinstance(own, JsonTokenizer)
    check_equal(own, load_tokenizer(path))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "mixtral"}),
        ("config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("config.json", {"_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"}),
        ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}),
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True, FORCED: True}),
        ("tokenizer_config.json", {"image_token": "<image>"}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<image>"}}),
        ("added_tokens.json", {"<tool>": 515}),
        ("tokenizer.json", {"truncation": "", "padding": ""}),
    ],
)
def test_a_rare_tokenizer_is_left_to_transformers(checkpoint, tmp_path, file, changes):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    values = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    if file == "tokenizer.json":
        tokenizer = Tokenizer.from_str(json.dumps(values))
        tokenizer.enable_padding(pad_token="<|endoftext|>")
        values, changes = json.loads(tokenizer.to_str()), {}
    (tmp_path / file).write_text(json.dumps(values | changes))
    with pytest.raises(NeedsTransformersError):
        open_json_tokenizer(tmp_path)
    with quiet_transformers():
        assert type(open_tokenizer(tmp_path)) is type(load_tokenizer(tmp_path))


def test_what_only_transformers_has_is_asked_of_it():
    own, theirs = open_tokenizer(embedded_model()), load_tokenizer(embedded_model())
    assert isinstance(own, JsonTokenizer)
    assert theirs is not None
    assert own.vocab_size == theirs.vocab_size
    assert own(["a", "b"], padding=True)["input_ids"] == theirs(["a", "b"], padding=True)["input_ids"]
    assert own.decode(5) == theirs.decode(5)
    assert own.apply_chat_template(MESSAGES, return_dict=False) == theirs.apply_chat_template(
        MESSAGES, return_dict=False
    )
    with pytest.raises(AttributeError, match="no attribute"):
        _ = own.no_such_attribute
