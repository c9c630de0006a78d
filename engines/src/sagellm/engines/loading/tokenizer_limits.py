"""Limits of a tokenizer's files, checked before anything is built of them.

Building takes time and memory in proportion to the files, and runs the normalizer on the added tokens. Each
limit is well above what published tokenizers have. The library tokenizers has no limits of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sagellm.core import CheckpointError, ConfigError
from sagellm.engines.config.bounded_json import parse_json
from sagellm.engines.loading.json_file import check_file
from sagellm.engines.loading.tokenizer_settings import given_tokens

JSON = "tokenizer.json"
MAX_TOKEN_CHARACTERS = 4096
_MAX_BYTES = 32 << 20
_MAX_BYTES_OF = {JSON: 128 << 20, "chat_template.jinja": 1 << 20}
MAX_ENTRIES = 1 << 20  # of the vocabulary, and as many merges; Gemma 3 has 262,144 and 514,906
_MAX_VOCAB_BYTES = 48 << 20  # 45 for each entry
MAX_ADDED = 1 << 17  # models of speech add 66,000
MAX_ADDED_CHARACTERS = 1 << 20
_MAX_PIECE_BYTES = 4 << 20  # of a Unigram model, which takes 340 times as much; XLM-RoBERTa has 2.5 MB
_MAX_STEP_BYTES = 512 << 10  # of tokenizer.json without its long lists; a table of NFKC has 320 kB
_MAX_PATTERN_CHARACTERS = 16 << 10  # of all regular expressions, which take up to a second to compile
_MAX_NORMALIZED_CHARACTERS = 4 << 20
_MAX_SEARCHED_CHARACTERS = 1024  # up to 20 ms each, where a regular expression backtracks
_SHORT = 4096  # bytes of a list that is parsed with the steps
_MARKS = {"vocab.json": b":", "vocab.txt": b"\n", "merges.txt": b"\n", "tekken.json": b"{"}
"""What each entry of a file has at least once."""
_TABLE = "precompiled_charsmap"
_PAIRS = re.compile(rb"\[\s*\[")


class _AddedToken(msgspec.Struct):
    content: str
    normalized: bool = True


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw()
    merges: msgspec.Raw = msgspec.Raw()


class _Json(msgspec.Struct):
    """The long parts of tokenizer.json, not yet parsed."""

    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: msgspec.Raw = msgspec.Raw()


class _Span(NamedTuple):
    """A part of a JSON text."""

    begin: int
    end: int


def max_bytes_of(name: str) -> int:
    """Return how large a file of a tokenizer may be."""
    return _MAX_BYTES_OF.get(name, _MAX_BYTES)


def check_tokenizer_files(files: Iterable[Path], folder: Path) -> None:
    """Check what the tokenizer of a directory would be built of; files may be missing.

    Takes a tenth of the time that building takes. Raises CheckpointError that names the file, the part and
    the limit.
    """
    for each in files:
        _check_file(each)
    file, own, steps = folder / JSON, list[_AddedToken](), dict[str, Any]()
    if file.exists():
        try:
            own, steps = _read_json(file)
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {JSON}: {error}") from error
    given = [_AddedToken(content, is_normalized) for content, is_normalized in given_tokens(folder)]
    _check_added(file, own)
    _check_added(f"{folder / 'tokenizer_config.json'}, with the files beside it,", given)
    _check_normalizer(file, steps.get("normalizer"), [*own, *given])


def _check_file(file: Path) -> None:
    if not file.exists():
        return
    check_file(file)
    check_count(file, "bytes", file.stat().st_size, max_bytes_of(file.name))
    if (mark := _MARKS.get(file.name)) is not None:
        check_count(file, "entries", file.read_bytes().count(mark), MAX_ENTRIES)


def check_count(where: Path | str, what: str, number: int, most: int) -> None:
    """Raise CheckpointError if there is more of something than any published tokenizer has."""
    if number > most:
        raise CheckpointError(
            f"{where} has {number:,} {what}; there may be at most {most:,}, and no published tokenizer has "
            f"as many: it is damaged, or made to do harm"
        )


def _read_json(file: Path) -> tuple[list[_AddedToken], dict[str, Any]]:
    """Return the added tokens, and everything but the long lists; these are counted but not parsed."""
    text = file.read_bytes()
    parts = msgspec.json.decode(text, type=_Json)
    vocab, merges, added = (
        _span(text, part) for part in (parts.model.vocab, parts.model.merges, parts.added_tokens)
    )
    check_count(file, "bytes in model.vocab", vocab.end - vocab.begin, _MAX_VOCAB_BYTES)
    check_count(file, "entries in model.vocab", _num_entries(text, vocab), MAX_ENTRIES)
    check_count(file, "entries in model.merges", _num_entries(text, merges), MAX_ENTRIES)
    check_count(file, "braces in added_tokens", text.count(b"{", *added), 2 * MAX_ADDED)
    if text[vocab.begin : vocab.begin + 1] == b"[":
        pieces = msgspec.json.decode(parts.model.vocab, type=list[tuple[str, Any]])
        num_bytes = sum(len(piece.encode()) for piece, _ in pieces)
        check_count(file, "bytes of pieces in model.vocab", num_bytes, _MAX_PIECE_BYTES)
    rest = _without(text, [vocab, merges, added])
    check_count(file, "bytes besides its tokens", len(rest), _MAX_STEP_BYTES)
    # Of two entries with one name, the library tokenizers might take the other one.
    steps = parse_json(rest, has_unique_names=True)
    assert isinstance(steps, dict), "it was read as one"
    patterns = list(_patterns(steps))
    check_count(file, "characters of regular expressions", sum(map(len, patterns)), _MAX_PATTERN_CHARACTERS)
    own = msgspec.json.decode(parts.added_tokens or b"[]", type=list[_AddedToken] | None)
    return own or [], steps


def _span(text: bytes, part: msgspec.Raw) -> _Span:
    raw = memoryview(part)
    begin = text.find(raw) if len(raw) else 0
    return _Span(begin, begin + len(raw))


def _num_entries(text: bytes, part: _Span) -> int:
    """Return at least the number of entries of an object, a list, or a list of pairs."""
    if text[part.begin : part.begin + 1] == b"{":
        return text.count(b":", *part)
    num_commas = text.count(b",", *part)
    return num_commas // 2 + 1 if _PAIRS.match(text, part.begin) else num_commas + 1


def _without(text: bytes, parts: Sequence[_Span]) -> bytes:
    """Return a text with null in place of long parts."""
    kept, position = [], 0
    for part in sorted(parts):
        if part.end - part.begin > _SHORT and part.begin >= position:
            kept += [text[position : part.begin], b"null"]
            position = part.end
    return b"".join((*kept, text[position:]))


def _check_added(where: Path | str, added: Sequence[_AddedToken]) -> None:
    lengths = [len(token.content) for token in added]
    check_count(where, "added tokens", len(added), MAX_ADDED)
    check_count(where, "characters in an added token", max(lengths, default=0), MAX_TOKEN_CHARACTERS)
    check_count(where, "characters in its added tokens", sum(lengths), MAX_ADDED_CHARACTERS)


def _check_normalizer(file: Path, normalizer: Any, added: Sequence[_AddedToken]) -> None:
    """Limit what building does: the normalizer runs on each added token that does not say otherwise."""
    total = sum(len(token.content) for token in added if token.normalized)
    check_count(
        file,
        "characters of normalized added tokens",
        total * growth_of(normalizer),
        _MAX_NORMALIZED_CHARACTERS,
    )
    num_searches = len(list(_patterns(normalizer))) + sum(_TABLE in step for step in steps_of(normalizer))
    check_count(
        file,
        "characters of added tokens to search by regular expressions and tables of its normalizer",
        total * num_searches,
        _MAX_SEARCHED_CHARACTERS,
    )


def steps_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a part of tokenizer.json, outer ones first."""
    if isinstance(part, dict):
        yield part
    for nested in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from steps_of(nested)


def _patterns(part: Any) -> Iterator[str]:
    return (str(step["Regex"]) for step in steps_of(part) if "Regex" in step)


def growth_of(part: Any) -> int:
    """Return the maximum number of characters that a normalizer or decoder writes for one."""
    return prod(map(_growth, steps_of(part)))


def _growth(step: Mapping[str, Any]) -> int:
    written = len(str(step.get("content") or step.get("prepend") or ""))
    pattern = step.get("pattern")
    replaced = len(str(pattern.get("String", ""))) if isinstance(pattern, Mapping) else 1
    return max(1, -(-written // replaced)) if replaced else 1 + written  # may match between characters, too
