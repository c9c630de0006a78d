"""The keys of a tokenizer's settings that are read: those that determine how text becomes tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sagellm.engines.loading.json_file import read_optional_json

SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json")
"""The files of which only some keys are read."""
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
_MAX_BYTES, _MAX_VALUES = 24 << 20, 1_250_000  # 131,072 added tokens, of 180 bytes and 8 values each


def read_settings(file: Path) -> dict[str, Any]:
    """Return the harmless entries of one of the files, none if there is no such file.

    Raises CheckpointError if it cannot be read.
    """
    values = read_whole(file)
    if file.name == "config.json":
        return {key: value for key, value in values.items() if key in _MODEL_KEYS and isinstance(value, str)}
    kept = _TOKENIZER_KEYS if file.name == "tokenizer_config.json" else _TOKEN_LIST_KEYS
    return {key: value for key, value in values.items() if key in kept or key.endswith("_token")}


def read_whole(file: Path) -> dict[str, Any]:
    """Return all entries of one of the files, none if there is no such file. Raises CheckpointError."""
    if file.name == "config.json":
        return read_optional_json(file)
    return read_optional_json(file, _MAX_BYTES, _MAX_VALUES)


def given_tokens(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the tokens that the files beside tokenizer.json name, and whether they would be normalized.

    Raises CheckpointError for a file that cannot be read.
    """
    for token in read_whole(folder / "added_tokens.json"):
        yield token, True
    for name in SETTINGS[1:]:
        for key, value in read_settings(folder / name).items():
            if key in _TOKEN_LIST_KEYS or key == "added_tokens_decoder" or key.endswith("_token"):
                yield from _tokens_in(value)


def _tokens_in(value: Any) -> Iterator[tuple[str, bool]]:
    """Yield the tokens of an entry: a text, an object with a `content`, or a list or object of them."""
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, dict) and isinstance(value.get("content"), str):
        yield value["content"], value.get("normalized") is not False
    else:
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from _tokens_in(each)
