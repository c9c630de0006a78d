"""A copy of a checkpoint's tokenizer for transformers to read, in which its configuration chooses nothing.

transformers reads a tokenizer's folder by itself: `tokenizer_config.json` and `special_tokens_map.json`
become arguments of a class, `tokenizer_class` may name any class of transformers, and the model's whole
`config.json` is read as well. Here it finds the vocabularies, and of the configuration the keys that say how
text becomes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sagellm.core import CheckpointError
from sagellm.engines.loading.json_file import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATES = "additional_chat_templates"
_NO_TOKENIZER = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".py", ".msgpack", ".h5", ".onnx"}

_OF_TOKENS = frozenset({"additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"})
_OF_TOKENIZER = _OF_TOKENS | {
    *("tokenizer_class", "backend", "legacy", "legacy_behaviour", "errors", "verbose", "fix_mistral_regex"),
    *("add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "split_special_tokens"),
    *("chat_template", "grounded_generation_template", "tool_use_template", "use_default_system_prompt"),
    *(
        "clean_up_tokenization_spaces",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    ),
    *("spaces_between_special_tokens", "special_tokens_pattern", "token_type_ids_pattern"),
    *("token_type_ids_include_special_tokens", "return_token_type_ids", "model_input_names"),
    *("model_max_length", "max_len", "padding_side", "truncation_side", "trim_offsets", "unk_id", "offset"),
    *(
        "do_lower_case",
        "do_lowercase",
        "do_lowercase_and_remove_accent",
        "do_basic_tokenize",
        "do_clean_text",
    ),
    *("do_split_on_punc", "clean_text", "tokenize_chinese_chars", "strip_accents", "keep_accents"),
    *("never_split", "normalization", "remove_space", "split_by_punct", "wordpieces_prefix", "extra_ids"),
    *("do_word_tokenize", "do_subword_tokenize", "word_tokenizer_type", "subword_tokenizer_type"),
    *("src_lang", "tgt_lang", "language_codes", "num_madeup_words"),
}
"""What reaches a tokenizer's class beside its special tokens: no file names, no options of others."""
_OF_MODEL = frozenset(
    {"model_type", "tokenizer_class", "model_name", "_name_or_path", "transformers_version"}
)
"""What of config.json chooses the tokenizer's class; all are strings."""


@contextmanager
def tokenizer_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder with links to the vocabularies in `path` and a configuration made anew.

    Raises CheckpointError for a file that cannot be read, and for a class that is not a tokenizer.
    """
    kept: dict[str, Callable[[str, Any], bool]] = {
        "config.json": lambda key, value: key in _OF_MODEL and isinstance(value, str),
        "tokenizer_config.json": lambda key, _: key in _OF_TOKENIZER or key.endswith("_token"),
        "special_tokens_map.json": lambda key, _: key in _OF_TOKENS or key.endswith("_token"),
    }
    with TemporaryDirectory(prefix="sagellm-tokenizer-") as made:
        folder = Path(made)
        for file in path.iterdir():
            if file.name == _TEMPLATES or (
                file.is_file() and _is_of_tokenizer(file) and file.name not in kept
            ):
                (folder / file.name).symlink_to(file.absolute())
        for name, is_kept in kept.items():
            if (path / name).exists():
                values = {key: value for key, value in read_json(path / name).items() if is_kept(key, value)}
                _check_class(path / name, values)
                (folder / name).write_text(json.dumps(values), encoding="utf-8")
        yield folder


def remember_real_paths(tokenizer: PreTrainedTokenizerBase, folder: Path, path: Path) -> None:
    """Have a tokenizer, which may remember its files, name them where they really are."""
    for name, value in list(vars(tokenizer).items()):
        if isinstance(value, str) and value.startswith(str(folder)):
            setattr(tokenizer, name, value.replace(str(folder), str(path), 1))


def _is_of_tokenizer(file: Path) -> bool:
    return file.suffix not in _NO_TOKENIZER and not file.name.endswith(".safetensors.index.json")


def _check_class(file: Path, values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a class of transformers that is not a tokenizer, such as a model's."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = values.get("tokenizer_class")
    if name is None:
        return
    find: Any = tokenizer_class_from_name
    short = str(name).removesuffix("Fast")
    for found in map(find, (str(name), short, f"{short}Fast")):
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise CheckpointError(f"{file}: tokenizer_class is {name!r}, which is not a tokenizer")
