"""The checkpoint's tokenizer, loaded from a temporary folder that has only harmless configuration keys.

Given the original folder, transformers turns `tokenizer_config.json` and `special_tokens_map.json` into
arguments of a class, accepts any of its classes as `tokenizer_class`, and reads the model's `config.json` as
well. The temporary one has the vocabularies, and the keys that determine how text becomes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sagellm.core import CheckpointError, get_logger
from sagellm.engines.config.shown import first_few, shown
from sagellm.engines.loading.decoder_limits import check_decoding
from sagellm.engines.loading.gguf_files import gguf_in
from sagellm.engines.loading.tokenizer_limits import check_tokenizer_files, max_bytes_of
from sagellm.engines.loading.tokenizer_settings import SETTINGS, read_settings, read_whole
from sagellm.engines.text.guarded_tokenizer import is_foreign

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sagellm.engines.text.tokenizer import Tokenizer

logger = get_logger(__name__)

_CONFIG = "tokenizer_config.json"
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", *_SENTENCEPIECE)
TOKENIZER_FILES = (_CONFIG, *_VOCABULARIES)
_ADVICE = "download what is missing, or name another tokenizer (model.tokenizer, --tokenizer)"
_TEMPLATES = "additional_chat_templates"
_OTHER_FILES = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja")
_OTHER_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".py", ".msgpack", ".h5", ".onnx"}


def open_tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer of a directory or a GGUF file for an engine, or None if it has none.

    It is made without transformers where that gives the same tokens. Raises what `load_tokenizer` raises.
    """
    from sagellm.engines.loading.json_tokenizer_files import open_json_tokenizer

    if (file := _gguf_file(path)) is not None:
        from sagellm.engines.loading.gguf_tokenizer import open_gguf_tokenizer

        return open_gguf_tokenizer(file)
    if not _has_tokenizer(path):
        return None
    try:
        return open_json_tokenizer(path)
    except BaseException as error:
        if not is_foreign(error):
            raise
        if not isinstance(error, Exception):  # transformers would meet the same panic
            raise _unloadable(path, error) from error
        # What is damaged, transformers' loading explains.
        logger.debug("transformers loads the tokenizer in %s: %s (%s)", path, error, type(error).__name__)
    loaded: Tokenizer | None = load_tokenizer(path)
    return loaded


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Return transformers' tokenizer of a directory, or None if it has none.

    Raises CheckpointError if it is damaged, has no vocabulary, or needs its own code, which is never run.
    """
    from transformers import AutoTokenizer

    if (file := _gguf_file(path)) is not None:
        from sagellm.engines.loading.gguf_tokenizer import open_gguf_tokenizer

        opened = open_gguf_tokenizer(file)
        return None if opened is None else opened.transformers
    if not _has_tokenizer(path):
        return None
    with tokenizer_folder(path) as folder:
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except BaseException as error:  # damaged files surface as errors of many libraries
            if not is_foreign(error):
                raise
            raise _unloadable(path, error, folder) from error
    restore_paths(tokenizer, folder, path)
    # Without the file, transformers makes a tokenizer that knows the special tokens and drops all text.
    if len(tokenizer) <= len({*_added_tokens(tokenizer), *tokenizer.all_special_ids}):
        raise CheckpointError(
            f"the tokenizer in {path} has no vocabulary, only {len(tokenizer)} special tokens: "
            f"{_what_lacks(path, tokenizer)}; {_ADVICE}"
        )
    return tokenizer


def _has_tokenizer(path: Path) -> bool:
    """Say whether there is any file of a tokenizer. Raises CheckpointError if one is too large."""
    if not _has_files(path):
        logger.warning("%s has no tokenizer; prompts must be token ids", path)
        return False
    templates = (path / _TEMPLATES).glob("*.jinja")
    check_tokenizer_files([*(path / name for name in (*TOKENIZER_FILES, *_OTHER_FILES)), *templates], path)
    return True


def names_tokenizer(path: Path) -> bool:
    """Say whether a directory or GGUF file may have a tokenizer. Cheap: reads only names."""
    return _has_files(path) or gguf_in(path) is not None


def _has_files(path: Path) -> bool:
    return any((path / name).exists() for name in TOKENIZER_FILES)


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a tokenizer is in; beside others of a directory, its own files count."""
    return None if _has_files(path) else gguf_in(path)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """Compare a tokenizer with the rows of the model's embedding; usually there are more rows than tokens.

    Raises CheckpointError if words have no row, or if a token's text could have any length. A few added
    tokens without a row, such as a padding token, are common and harmless: prompts with them are refused.
    """
    check_decoding(tokenizer, path)
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
        "the embedding has no row for %s of the tokenizer in %s; a prompt with such a token is refused",
        first_few(list(added.values())),
        path,
    )


def _added_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each token that was added to the vocabulary, most of them special."""
    try:
        return {token_id: str(token) for token_id, token in sorted(tokenizer.added_tokens_decoder.items())}
    except NotImplementedError:  # mistral-common's tokenizer has none
        return {}


def _unloadable(path: Path, error: BaseException, folder: Path | None = None) -> CheckpointError:
    """Return the error for a tokenizer that could not be made; `folder` stands for `path` in its message."""
    reason = _reason(path, error).replace(str(folder or path), str(path))
    return CheckpointError(f"the tokenizer in {path} cannot be loaded: {reason}")


def _reason(path: Path, error: BaseException) -> str:
    """Say why a tokenizer could not be loaded, judging by its files where they say more."""
    own_code = read_whole(path / _CONFIG).get("auto_map")
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


@contextmanager
def tokenizer_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder with links to the vocabularies in `path` and a filtered configuration.

    Raises CheckpointError for a file that cannot be read, and for a class that is not a tokenizer.
    """
    with TemporaryDirectory(prefix="sagellm-tokenizer-") as made:
        folder = Path(made)
        for file in path.iterdir():
            if file.name == _TEMPLATES or (
                file.is_file() and _may_be_tokenizer_file(file) and file.name not in SETTINGS
            ):
                (folder / file.name).symlink_to(file.absolute())
        for name in SETTINGS:
            if (path / name).exists():
                values = read_settings(path / name)
                _check_class(path / name, values)
                (folder / name).write_text(json.dumps(values), encoding="utf-8")
        yield folder


def restore_paths(tokenizer: PreTrainedTokenizerBase, folder: Path, path: Path) -> None:
    """Replace paths in the temporary folder that a tokenizer has stored by the original ones."""
    for name, value in list(vars(tokenizer).items()):
        if isinstance(value, str) and value.startswith(str(folder)):
            setattr(tokenizer, name, value.replace(str(folder), str(path), 1))


def _may_be_tokenizer_file(file: Path) -> bool:
    is_other = file.suffix in _OTHER_SUFFIXES or file.name.endswith(".safetensors.index.json")
    return not is_other and file.stat().st_size <= max_bytes_of(file.name)


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
