"""What models with interchangeable KV have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sagellm.core import ProviderSpec
    from sagellm.engines.config.sections import ModelConfig


def fingerprint_of(files: Iterable[Path], settings: ModelConfig) -> str:
    """Return a hash of a checkpoint's files and of how they are loaded, as 32 hex digits.

    Reads every byte of the weights, about 1 s per GB: a block of another model must never be found.
    """
    digest = blake2b(digest_size=16)
    parts = [settings.dtype, _text(settings.quantization)]
    if settings.sparsity is not None:  # without it, what was saved before there was such a setting is found
        parts.append(_text(settings.sparsity))
    if settings.activations is not None:
        parts.append(f"activations {settings.activations}")
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as opened:
            file_digest(opened, lambda: digest)
    return digest.hexdigest()


def _text(provider: ProviderSpec | None) -> str:
    plain = "" if provider is None else provider.plain()
    return json.dumps(plain, sort_keys=True, default=str) if isinstance(plain, dict) else plain
