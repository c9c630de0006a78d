"""What a checkpoint's tokenizer may do to generated tokens, which become text where other requests wait.

The library tokenizers runs whatever decoder its file describes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core import CheckpointError
from sagellm.engines.config.shown import clipped
from sagellm.engines.loading.tokenizer_limits import MAX_TOKEN_CHARACTERS, growth_of, steps_of

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

_KINDS = (
    *("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"),
    "Sequence",
)
"""The decoders of published models; each takes time in proportion to its text."""
_MAX_STEPS = 8  # Llama 2 has five, the Sequence among them
_MAX_REPLACES = 2
_MAX_MATCHES = 64  # in one token, at a microsecond each; Gemma has a token of 31 spaces
_MAX_CHARACTERS = 16
_MAX_STRIPPED = 8  # from both ends by all steps; Llama 2 strips one
_MAX_GROWTH = 4


def check_decoding(tokenizer: Tokenizer, path: Path) -> None:
    """Raise CheckpointError if the text of a token may take long to make, or be long.

    What passes takes microseconds a token, in the worst case found 0.3 ms. Tokenizers that are not of the
    library tokenizers run transformers' own code.
    """
    vocab = tokenizer.get_vocab()
    longest = max(map(len, vocab), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"the tokenizer in {path} has a token of {longest:,} characters; there may be at most "
            f"{MAX_TOKEN_CHARACTERS:,}: its files are damaged"
        )
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is not None and (reason := _refusal(json.loads(decoder.__getstate__()), vocab)):
        raise CheckpointError(
            f"the decoder of the tokenizer in {path} (tokenizer.json) {reason}. It runs where other requests "
            f"wait, so it may have {_MAX_STEPS} steps of the kinds {', '.join(_KINDS)}, {_MAX_REPLACES} of "
            f"them Replace, with texts of up to {_MAX_CHARACTERS} characters and no regular expression"
        )


def _refusal(decoder: dict[str, Any], vocab: Collection[str]) -> str | None:
    """Say why a decoder is refused, or None."""
    parts = list(steps_of(decoder))
    kinds = [str(part["type"]) for part in parts if "type" in part]
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        return f"has a step of the kind {clipped(unknown[0], 64)}"
    if len(kinds) > _MAX_STEPS or kinds.count("Replace") > _MAX_REPLACES:
        return f"has {len(kinds):,} steps, {kinds.count('Replace'):,} of them Replace"
    if any("Regex" in part for part in parts):
        return "replaces what a regular expression matches, which may take minutes"
    texts = (text for part in parts for key, text in part.items() if key != "type" and isinstance(text, str))
    longest = max(map(len, texts), default=0)
    if longest > _MAX_CHARACTERS:
        return f"replaces or inserts up to {longest:,} characters"
    num_stripped = sum(part.get(end, 0) for part in parts for end in ("start", "stop"))
    if num_stripped > _MAX_STRIPPED:
        return f"strips up to {num_stripped:,} characters, and {_MAX_STRIPPED} is allowed"
    if (growth := growth_of(decoder)) > _MAX_GROWTH:
        return f"can make a text {growth} times as long, and {_MAX_GROWTH} times is allowed"
    patterns = [part["String"] for part in parts if "String" in part]
    matches = max((_most_matches(pattern, vocab) for pattern in patterns), default=0)
    if matches > _MAX_MATCHES:
        return f"replaces up to {matches:,} places of a token, and {_MAX_MATCHES} is allowed"
    return None


def _most_matches(pattern: str, vocab: Collection[str]) -> int:
    """Return how often a pattern occurs in a token, at most; of a token that is too short for many, 0."""
    return max((token.count(pattern) for token in vocab if len(token) > _MAX_MATCHES), default=0)
