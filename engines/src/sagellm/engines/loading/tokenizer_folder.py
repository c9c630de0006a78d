"""A temporary folder with a checkpoint's tokenizer for transformers, with only harmless configuration keys.

Given the original folder, transformers turns `tokenizer_config.json` and `special_tokens_map.json` into
arguments of a class, accepts any of its classes as `tokenizer_class`, and reads the model's `config.json` as
well. This folder has the vocabularies, and the keys that determine how text becomes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sagellm.core import CheckpointError
from sagellm.engines.config.shown import shown
from sagellm.engines.loading.json_file import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATES = "additional_chat_templates"
_OTHER_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".py", ".msgpack", ".h5", ".onnx"}

_TOKEN_LIST_KEYS = frozenset(
    {"additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"}
)
_TOKENIZER_KEYS = _TOKEN_LIST_KEYS | {
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
"""Keys of tokenizer_config.json that are kept, besides `..._token`: none names files or code."""
_MODEL_KEYS = frozenset(
    {"model_type", "tokenizer_class", "model_name", "_name_or_path", "transformers_version"}
)
"""Keys of config.json that select the tokenizer's class; all are strings."""


@contextmanager
def tokenizer_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder with links to the vocabularies in `path` and a filtered configuration.

    Raises CheckpointError for a file that cannot be read, and for a class that is not a tokenizer.
    """
    kept: dict[str, Callable[[str, Any], bool]] = {
        "config.json": lambda key, value: key in _MODEL_KEYS and isinstance(value, str),
        "tokenizer_config.json": lambda key, _: key in _TOKENIZER_KEYS or key.endswith("_token"),
        "special_tokens_map.json": lambda key, _: key in _TOKEN_LIST_KEYS or key.endswith("_token"),
    }
    with TemporaryDirectory(prefix="sagellm-tokenizer-") as made:
        folder = Path(made)
        for file in path.iterdir():
            if file.name == _TEMPLATES or (
                file.is_file() and _may_be_tokenizer_file(file) and file.name not in kept
            ):
                (folder / file.name).symlink_to(file.absolute())
        for name, is_kept in kept.items():
            if (path / name).exists():
                values = {key: value for key, value in read_json(path / name).items() if is_kept(key, value)}
                _check_class(path / name, values)
                (folder / name).write_text(json.dumps(values), encoding="utf-8")
        yield folder


def restore_paths(tokenizer: PreTrainedTokenizerBase, folder: Path, path: Path) -> None:
    """Replace paths in the temporary folder that a tokenizer has stored by the original ones."""
    for name, value in list(vars(tokenizer).items()):
        if isinstance(value, str) and value.startswith(str(folder)):
            setattr(tokenizer, name, value.replace(str(folder), str(path), 1))


def _may_be_tokenizer_file(file: Path) -> bool:
    return file.suffix not in _OTHER_SUFFIXES and not file.name.endswith(".safetensors.index.json")


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
            raise CheckpointError(f"{file}: tokenizer_class is {shown(name)}, which is not a tokenizer")
