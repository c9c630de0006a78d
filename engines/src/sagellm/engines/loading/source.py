"""Where a model's files are: a directory, a GGUF file, the local Hugging Face cache, or the hub.

huggingface_hub finds and downloads; it neither says what an incomplete snapshot lacks nor bounds how long a
look-up of the hub's address takes.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import CheckpointError, ConfigError, get_logger
from sagellm.engines.config.shown import first_few
from sagellm.engines.embedded import EMBEDDED, embedded_model
from sagellm.engines.loading.checkpoint import CONFIG, INDEX, SINGLE, files_in, missing_shards
from sagellm.engines.loading.gguf_files import SUFFIX, gguf_in, parts_of
from sagellm.engines.loading.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from sagellm.engines.config.sections import ModelConfig

logger = get_logger(__name__)

_HUB_ID = re.compile(r"(?:\w(?:[\w.-]{0,94}\w)?/)?\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_TOKENIZER = ["*.json", "*.txt", "*.jinja", "*.model", "tokenizer*"]
_MODEL = ["*.safetensors", *_TOKENIZER]
_UNWANTED = ["*/*", "consolidated*"]  # other formats and copies of the same weights
_REQUEST_TIMEOUT_S = 5.0
_REACH_TIMEOUT_S = 8.0  # looking up a host's address can outlast every timeout of a request


@dataclass(frozen=True, kw_only=True)
class _HubModel:
    repo_id: str
    revision: str | None
    cache_dir: Path | None
    endpoint: str | None
    has_weights: bool
    gguf_files: Sequence[str] = ()  # the one that is asked for, or all of its parts

    @property
    def wanted(self) -> list[str]:
        """Patterns of the files that are needed."""
        if self.gguf_files:
            return list(self.gguf_files)
        return _MODEL if self.has_weights else _TOKENIZER

    def __str__(self) -> str:
        named = f"{self.repo_id}:{self.gguf_files[0]}" if self.gguf_files else self.repo_id
        return named if self.revision is None else f"{named} at {self.revision}"


def resolve_tokenizer(settings: ModelConfig) -> Path:
    """Return the directory or GGUF file of a model's tokenizer, possibly another model's.

    Raises CheckpointError.
    """
    if settings.tokenizer is None:
        return resolve_source(settings.name, revision=settings.revision)
    return resolve_source(settings.tokenizer, has_weights=False)


def resolve_source(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    offline: bool | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
    has_weights: bool = True,
) -> Path:
    """Return the directory that holds a model's files, or its GGUF file.

    `name` is a directory, a GGUF file, a hub id, one with a GGUF file of it (`organisation/name:file.gguf`),
    or EMBEDDED for the model that ships with this package. A hub id is looked up in the local cache first,
    and only then downloaded (safetensors, configs and tokenizer, or the named file; nothing else). Raises
    CheckpointError: at once for a path that does not exist, within 10 s if the hub cannot be reached;
    ConfigError for a revision of a directory or file. `offline` is taken from HF_HUB_OFFLINE, `cache_dir`
    from HF_HOME, `endpoint` from HF_ENDPOINT if not given. Without `has_weights` a tokenizer is enough.
    """
    text = os.fspath(name)
    path = embedded_model() if text == EMBEDDED else Path(text).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"model.revision is {revision!r}, but the model {text!r} is a directory ({path.resolve()}), "
                f"which has no revisions; leave it out, or give a hub id that is not also a directory"
            )
        return (gguf_in(path) if has_weights else None) or path
    if path.exists():
        return _given_file(text, path, revision)
    model = _HubModel(
        **_hub_name(text),
        revision=revision,
        cache_dir=cache_dir,
        endpoint=endpoint,
        has_weights=has_weights,
    )
    found = _find_on_hub(model, offline=offline)
    return found / model.gguf_files[0] if model.gguf_files else found


def _given_file(text: str, path: Path, revision: str | None) -> Path:
    """Return a file that was named as the model. Raises CheckpointError unless it is GGUF."""
    if path.suffix.lower() != SUFFIX:
        raise CheckpointError(
            f"{text} is a file; give the directory that holds config.json and the weights, or a {SUFFIX} file"
        )
    if revision is not None:
        raise ConfigError(
            f"model.revision is {revision!r}, but the model {text!r} is a file, which has no revisions"
        )
    return path


def _hub_name(text: str) -> dict[str, Any]:
    """Return the id of a model on a hub, and the GGUF file of it that a text names.

    Raises CheckpointError for a text that is neither.
    """
    repo_id, _, file = text.partition(":")
    is_gguf = text.lower().endswith(SUFFIX)
    if is_hub_id(repo_id) and is_gguf and file and ".." not in file and not file.startswith("/"):
        return {"repo_id": repo_id, "gguf_files": parts_of(file)}
    if is_gguf:
        raise CheckpointError(
            f"there is no file {text}; give the path of one, or organisation/name:file{SUFFIX} for one on "
            f"the hub"
        )
    if is_hub_id(text):
        return {"repo_id": text}
    raise CheckpointError(f"{text!r} is neither a directory nor a hub id (organisation/name)")


def _find_on_hub(model: _HubModel, *, offline: bool | None) -> Path:
    """Return the snapshot of a model, from the cache or downloaded."""
    cached = _find_cached(model)
    lack = _what_lacks(model, cached)
    if cached is not None and not lack:
        return cached
    if _is_offline() if offline is None else offline:
        raise CheckpointError(
            f"{model} {lack}, and offline mode is on; unset HF_HUB_OFFLINE to download it, or give a "
            f"directory that holds it"
        )
    _check_reachable(model, lack)
    return _download(model, lack)


def is_hub_id(text: str) -> bool:
    """Say whether a text can be the name of a model on a hub."""
    is_named = _HUB_ID.fullmatch(text) and ".." not in text and "--" not in text
    return bool(is_named) and not text.endswith(".git")


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _find_cached(model: _HubModel) -> Path | None:
    """Return the cached snapshot; an interrupted download may have left it incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            model.repo_id,
            revision=model.revision,
            cache_dir=model.cache_dir,
            allow_patterns=model.wanted,
            ignore_patterns=None if model.gguf_files else _UNWANTED,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder)


def _what_lacks(model: _HubModel, snapshot: Path | None) -> str:
    """Say what the local cache lacks of a model; empty if it has everything needed."""
    if snapshot is None:
        return "is not in the local Hugging Face cache, and no directory has that name"
    lack = ""
    if model.gguf_files:
        absent = [name for name in model.gguf_files if not (snapshot / name).exists()]
        if absent:
            lack = f"has no {first_few(absent)}"
    elif not model.has_weights:
        if not any((snapshot / name).exists() for name in TOKENIZER_FILES):
            lack = "has no tokenizer"
    elif not (snapshot / CONFIG).exists():
        lack = f"has no {CONFIG}"
    elif not any((snapshot / name).exists() for name in (SINGLE, INDEX)):
        lack = f"has no weights, neither {SINGLE} nor {INDEX}"
    elif not (snapshot / SINGLE).exists() and (missing := missing_shards(snapshot)):
        lack = f"lacks {missing}"
    return lack and (
        f"is in the local Hugging Face cache only in part: the snapshot {snapshot} {lack}; it has "
        f"{files_in(snapshot)}"
    )


def _check_reachable(model: _HubModel, lack: str) -> None:
    """Ask the hub about the model, and stop waiting in time."""
    failures: list[Exception] = []
    asking = threading.Thread(target=_ask_hub, args=(model, failures), daemon=True)
    asking.start()
    asking.join(_REACH_TIMEOUT_S)
    if asking.is_alive():
        failures.append(TimeoutError(f"no answer within {_REACH_TIMEOUT_S:.0f} s"))
    if failures and isinstance(failures[0], CheckpointError):
        raise failures[0]
    if failures:
        raise _explain(model, failures[0], lack) from failures[0]


def _ask_hub(model: _HubModel, failures: list[Exception]) -> None:
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=model.endpoint).model_info(
            model.repo_id, revision=model.revision, timeout=_REQUEST_TIMEOUT_S
        )
        _check_names(model, [file.rfilename for file in info.siblings or ()])
    except Exception as error:  # carried to the thread that waits
        failures.append(error)


def _check_names(model: _HubModel, names: Sequence[str]) -> None:
    """Raise CheckpointError for a GGUF file that a repository lacks, or that is all it has but not named."""
    files = [name for name in names if name.lower().endswith(SUFFIX)]
    if missing := [name for name in model.gguf_files if name not in names]:
        raise CheckpointError(
            f"{model.repo_id} has no {first_few(missing)}; of {SUFFIX} files it has "
            f"{first_few(files) or 'none'}"
        )
    is_plain = model.has_weights and not model.gguf_files
    if is_plain and files and not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(
            f"{model} has weights as GGUF only; name one of its files: "
            f"{first_few([f'{model.repo_id}:{name}' for name in files])}"
        )


def _download(model: _HubModel, lack: str) -> Path:
    from huggingface_hub import snapshot_download

    logger.info("downloading %s", model)
    try:
        folder = snapshot_download(
            model.repo_id,
            revision=model.revision,
            cache_dir=model.cache_dir,
            endpoint=model.endpoint,
            allow_patterns=model.wanted,
            ignore_patterns=None if model.gguf_files else _UNWANTED,
        )
    except Exception as error:  # connection, disk and permission errors of several libraries
        raise _explain(model, error, lack) from error
    return Path(folder)


def _explain(model: _HubModel, error: Exception, lack: str) -> CheckpointError:
    from huggingface_hub import errors

    advice: list[tuple[Any, str]] = [
        (errors.GatedRepoError, "access to it must be granted on its page; then log in with `hf auth login`"),
        (
            errors.RepositoryNotFoundError,
            "no directory has that name, and the hub knows no such model, or it is private: check the "
            "spelling, or log in with `hf auth login`",
        ),
        (errors.RevisionNotFoundError, "the model has no such revision"),
    ]
    for kind, text in advice:
        if isinstance(error, kind):
            return CheckpointError(f"{model}: {text}")
    return CheckpointError(
        f"{model} {lack}, and the hub could not be used ({type(error).__name__}: {error}); check the "
        f"network, or give a directory"
    )
