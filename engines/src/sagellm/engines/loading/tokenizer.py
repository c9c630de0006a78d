"""The checkpoint's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import CheckpointError, get_logger
from sagellm.engines.loading.json_file import check_file, read_optional_json
from sagellm.engines.loading.tokenizer_folder import restore_paths, tokenizer_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_CONFIG = "tokenizer_config.json"
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", *_SENTENCEPIECE)
TOKENIZER_FILES = (_CONFIG, *_VOCABULARIES)
_MAX_TOKEN_CHARACTERS = 16 << 10
_MAX_GROWTH = 64
_ADVICE = "download what is missing, or name another tokenizer (model.tokenizer, --tokenizer)"


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Return transformers' tokenizer of a directory, or None if it has none.

    Raises CheckpointError if it is damaged, has no vocabulary, or needs its own code, which is never run.
    """
    from transformers import AutoTokenizer

    if not any((path / name).exists() for name in TOKENIZER_FILES):
        logger.warning("%s has no tokenizer; prompts must be token ids", path)
        return None
    for name in (*TOKENIZER_FILES, "merges.txt"):
        check_file(path / name)
    with tokenizer_folder(path) as folder:
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # damaged files surface as errors of many libraries
            reason = _reason(path, error).replace(str(folder), str(path))
            raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {reason}") from error
    restore_paths(tokenizer, folder, path)
    # Without the file, transformers makes a tokenizer that knows the special tokens and drops all text.
    if len(tokenizer) <= len({*_added_tokens(tokenizer), *tokenizer.all_special_ids}):
        raise CheckpointError(
            f"the tokenizer in {path} has no vocabulary, only {len(tokenizer)} special tokens: "
            f"{_what_lacks(path, tokenizer)}; {_ADVICE}"
        )
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, path: Path) -> None:
    """Compare a tokenizer with the rows of the model's embedding; usually there are more rows than tokens.

    Raises CheckpointError if words have no row, or if a token's text could have any length. A few added
    tokens without a row, such as a padding token, are common and harmless: prompts with them are refused.
    """
    _check_lengths(tokenizer, path)
    if len(tokenizer) <= vocab_size:
        return
    beyond = {token_id for token_id in tokenizer.get_vocab().values() if token_id >= vocab_size}
    added = {token_id: text for token_id, text in _added_tokens(tokenizer).items() if token_id in beyond}
    if beyond - added.keys():
        raise CheckpointError(
            f"the tokenizer in {path} has {len(tokenizer)} tokens, the model's embedding {vocab_size} "
            f"(vocab_size): they belong to different checkpoints, or config.json was changed; name the "
            f"model's own tokenizer (model.tokenizer, --tokenizer)"
        )
    logger.warning(
        "the embedding has no row for %s of the tokenizer in %s; prompts with it are refused",
        ", ".join(added.values()),
        path,
    )


def _check_lengths(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Raise CheckpointError if decoding one token could take so long that it delays other requests."""
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > _MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"the tokenizer in {path} has a token of {longest:,} characters; there may be at most "
            f"{_MAX_TOKEN_CHARACTERS:,}: its files are damaged"
        )
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    growth = 1 if decoder is None else _growth(json.loads(decoder.__getstate__()))
    if growth > _MAX_GROWTH:
        raise CheckpointError(
            f"the decoder of the tokenizer in {path} can make a text {growth} times as long (the content of "
            f"its Replace steps); it may be at most {_MAX_GROWTH} times: its files are damaged"
        )


def _growth(decoder: Mapping[str, Any]) -> int:
    """Return the maximum number of characters that a decoder can make of one."""
    steps = [_growth(step) for step in decoder.get("decoders", ())]
    is_pattern = "Regex" in decoder.get("pattern", ())  # may match between characters too
    return prod(steps, start=max(1, len(decoder.get("content", "")) + is_pattern))


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the text of each token that was added to the vocabulary, most of them special."""
    try:
        return {token_id: str(token) for token_id, token in sorted(tokenizer.added_tokens_decoder.items())}
    except NotImplementedError:  # mistral-common's tokenizer has none
        return {}


def _reason(path: Path, error: Exception) -> str:
    """Say why transformers could not load a tokenizer, judging by its files where they say more."""
    own_code = read_optional_json(path / _CONFIG).get("auto_map")
    if own_code:
        return f"it needs code of its own ({own_code}), which is never run"
    present = _present(path)
    if not present:
        return f"{_what_lacks(path, None)}; {_ADVICE}"
    if set(present) <= set(_SENTENCEPIECE) and find_spec("sentencepiece") is None:
        return (
            f"{present[0]} needs the package sentencepiece (pip install sentencepiece), which is not "
            f"installed; install it, or give a tokenizer.json"
        )
    return f"{error} ({type(error).__name__}); its vocabulary is in {', '.join(present)}"


def _present(path: Path) -> list[str]:
    return [name for name in _VOCABULARIES if (path / name).exists()]


def _what_lacks(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Say which files of a vocabulary are missing, or which one is empty."""
    if present := _present(path):
        return f"{', '.join(present)} has none that its class can read"
    own = () if tokenizer is None else tokenizer.vocab_files_names.values()
    others = [name for name in own if name != "tokenizer.json"]
    instead = f", nor {' with '.join(others)}" if others else ""
    return f"there is {_CONFIG}, but no tokenizer.json{instead}"
