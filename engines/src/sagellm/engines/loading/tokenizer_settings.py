"""The keys of a tokenizer's settings that are read: those that determine how text becomes tokens."""

from __future__ import annotations

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


def read_settings(file: Path) -> dict[str, Any]:
    """Return the harmless entries of one of the files, none if there is no such file.

    Raises CheckpointError if it cannot be read.
    """
    values = read_optional_json(file)
    if file.name == "config.json":
        return {key: value for key, value in values.items() if key in _MODEL_KEYS and isinstance(value, str)}
    kept = _TOKENIZER_KEYS if file.name == "tokenizer_config.json" else _TOKEN_LIST_KEYS
    return {key: value for key, value in values.items() if key in kept or key.endswith("_token")}
