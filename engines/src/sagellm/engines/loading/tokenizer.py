"""The checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sagellm.core import CheckpointError, get_logger
from sagellm.engines.loading.json_file import check_is_plain, read_optional_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Return transformers' tokenizer of a directory, or None if it has none.

    Raises CheckpointError if it is damaged or would need code of its own, which is never run.
    """
    from transformers import AutoTokenizer

    if not any((path / name).exists() for name in TOKENIZER_FILES):
        logger.warning("%s has no tokenizer; prompts must be token ids", path)
        return None
    for name in TOKENIZER_FILES:
        check_is_plain(path / name)
    own_code = read_optional_json(path / "tokenizer_config.json").get("auto_map")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # damaged files surface as errors of many libraries
        reason = f"; it brings code of its own ({own_code}), which is never run" if own_code else ""
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded{reason}: {error}") from error
    return tokenizer
